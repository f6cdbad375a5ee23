"""Checkpoints go to plain torch, FSDP2 and DDP, and come from them, through torch's own tools."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

from tests.checkpoint.helpers import adamw, build, load, same, save, whole
from tests.compat.harness import MLP, batch, plain_backward
from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from torch_shard.checkpoint.sharded.entry_tree import optimizer_of
from torch_shard.errors import StateDictError


def double() -> nn.Module:
    return MLP().double()


def train(model: nn.Module, optimizer: Any, rank: int, steps: range = range(2)) -> None:
    for step in steps:
        plain_backward(model, batch(rank, step))
        optimizer.step()
        optimizer.zero_grad()


def trained(rank: int, **config: Any) -> Any:
    made = build(make=adamw, model=double, **config)
    train(made[0], made[2], rank)
    return made


def plain(seed: int = 3) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = double()
    return model, adamw(model)


def by_name(model: nn.Module, optimizer: Any) -> dict[str, Any]:
    """The whole state of an unsharded or FSDP2 model, in the form of `whole`. Collective."""
    options = StateDictOptions(full_state_dict=True)
    values, state = get_state_dict(model, optimizer, options=options)
    return {"model": values, "optimizer": state}


def saved_as(form: str, rank: int, path: Path) -> tuple[nn.Module, Any]:
    """Train a model as others do, save it in the form that they have it in, and return it and its optimizer.

    DDP has its wrapper's prefix, and numbers for names; torchtitan the model at the top, the optimizer's state flattened, and
    settings by parameter; torch's recipe an application's state.
    """
    model, optimizer = plain()
    if form.startswith("fsdp2"):
        for block in model.blocks:
            fully_shard(block)
        fully_shard(model)
        optimizer = adamw(model)
        wrapped = model
    else:
        wrapped = DistributedDataParallel(model)
    train(wrapped, optimizer, rank)
    options = StateDictOptions(flatten_optimizer_state_dict=form == "titan")
    values, state = get_state_dict(model, optimizer, options=options)
    contents = {
        "fsdp2": {"model": values, "optimizer": state},
        "fsdp2 optim": {"model": values, "optim": state},
        "ddp": {"model": wrapped.state_dict(), "optimizer": optimizer.state_dict()},
        "titan": {**values, "optimizer": state, "train_state": {"step": 2}},
        "app": {"app": {"model": values, "optim": state}},
    }
    dcp.save(contents[form], checkpoint_id=path)
    return model, optimizer


@ranks(2)
def test_dcp_to_torch_save_makes_a_plain_file(rank, tmp_path):
    model, engine, optimizer = trained(rank)
    save(engine, tmp_path / "c", optimizer, extra={"epoch": 4, "seen": torch.arange(3)})
    expected = whole(engine, optimizer)
    if rank == 0:
        dcp_to_torch_save(tmp_path / "c", tmp_path / "plain.pt")
        found = torch.load(tmp_path / "plain.pt", weights_only=True)
        assert found.pop("extra")["epoch"] == 4
        same(found, expected)
        model, optimizer = plain()
        model.load_state_dict(found["model"])
        names = [n for n, _ in model.named_parameters()]
        set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
        assert set(names) == set(found["optimizer"]["state"])
    dist.barrier()


@pytest.mark.parametrize("form", ["ddp", "titan", "app", "fsdp2 optim", *exhaustive("fsdp2")])
@ranks(2)
def test_what_others_have_saved_loads(form, rank, tmp_path):
    other, second = saved_as(form, rank, tmp_path / "c")
    model, engine, optimizer = build(seed=2, make=adamw, model=double)
    load(engine, tmp_path / "c", optimizer)
    same(whole(engine, optimizer), by_name(other, second))
    train(model, optimizer, rank, range(2, 3))


@ranks(2)
def test_settings_by_parameter_that_differ_within_one_of_our_groups_are_refused(rank, tmp_path):
    def grouped(model: nn.Module) -> torch.optim.Optimizer:
        matrices, rest = ([p for p in model.parameters() if (p.dim() > 1) is large] for large in (True, False))
        return torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": rest, "weight_decay": 0.0}])

    model = double()
    optimizer = grouped(model)
    train(model, optimizer, rank)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    values, state = get_state_dict(model, optimizer, options=options)
    dcp.save({"model": values, "optimizer": state}, checkpoint_id=tmp_path / "c")
    _model, engine, optimizer = build(seed=2, make=lambda m: torch.optim.AdamW(m.parameters()), model=double)
    before = whole(engine, optimizer)
    with pytest.raises(StateDictError, match=r"weight_decay is 0\.1 for \S+\.weight and 0\.0 for \S+\.bias"):
        load(engine, tmp_path / "c", optimizer)
    same(whole(engine, optimizer), before)
    engine.close()
    _model, engine, optimizer = build(seed=2, make=grouped, model=double)
    load(engine, tmp_path / "c", optimizer)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]


@pytest.mark.parametrize("kind", [*exhaustive("unsharded"), "fsdp2"])
@ranks(2)
def test_torch_loads_ours(kind, rank, tmp_path):
    _model, engine, optimizer = trained(rank)
    save(engine, tmp_path / "c", optimizer)
    other, second = plain()
    if kind == "fsdp2":
        for block in other.blocks:
            fully_shard(block)
        fully_shard(other)
        second = adamw(other)
    values, state = get_state_dict(other, second)
    dcp.load({"model": values, "optimizer": state}, checkpoint_id=tmp_path / "c")
    set_state_dict(other, second, model_state_dict=values, optim_state_dict=state)
    same(by_name(other, second), whole(engine, optimizer))


@ranks(2)
def test_dcp_itself_loads_ours_into_shard_tensors(rank, tmp_path):
    _model, engine, optimizer = trained(rank)
    save(engine, tmp_path / "c", optimizer)
    model, other, _ = build(seed=2, model=double, make=adamw)
    dcp.load({"model": model.state_dict()}, checkpoint_id=tmp_path / "c")
    same(whole(other), whole(engine))


@ranks(2)
def test_state_dicts_given_to_dcp_itself(rank, tmp_path):
    model, engine, optimizer = trained(rank)
    expected = whole(engine, optimizer)
    dcp.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=tmp_path / "c")
    model, other, second = build(seed=2, make=adamw, model=double)
    load(other, tmp_path / "c", second)
    same(whole(other, second), expected)
    train(model, second, rank, range(2, 3))
    into = {"model": model.state_dict(), "optimizer": copy.copy(second.state_dict())}
    dcp.load(into, checkpoint_id=tmp_path / "c")
    second.load_state_dict(into["optimizer"])
    same(whole(other, second), expected)


def test_a_flattened_optimizers_numbered_groups_have_all_their_settings():
    """Of a state dict with names of parameters that was flattened key by key."""
    moment = torch.ones(2)
    flat = {
        "param_groups.0.lr": 0.1,
        "param_groups.0.eps": 1e-8,
        "param_groups.1.lr": 0.2,
        "state.a.exp_avg": moment,
        "state.b.exp_avg": moment,
    }
    found = optimizer_of(flat, {"a", "b"})
    assert found.groups == [{"lr": 0.1, "eps": 1e-8}, {"lr": 0.2}]
    assert found.state == {"a": {"exp_avg": moment}, "b": {"exp_avg": moment}}
