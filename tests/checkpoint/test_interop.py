"""Checkpoints go to plain torch, FSDP2 and DDP, and come from them, through torch's own tools."""

from __future__ import annotations

import copy
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

from tests.checkpoint.helpers import build, load, same, save, whole
from tests.compat.harness import MLP, batch, plain_backward
from tests.support.marks import exhaustive
from tests.support.ranks import ranks


def groups(model: nn.Module) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    return [
        {"params": [p for _, p in named if p.ndim >= 2], "weight_decay": 0.1},
        {"params": [p for _, p in named if p.ndim < 2], "lr": 0.02},
    ]


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups(model), lr=0.01)


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


@pytest.mark.parametrize("key", [*exhaustive("optimizer"), "optim"])
@ranks(2)
def test_what_fsdp2_has_saved_loads(key, rank, tmp_path):
    other, _ = plain()
    for block in other.blocks:
        fully_shard(block)
    fully_shard(other)
    second = adamw(other)
    train(other, second, rank)
    values, state = get_state_dict(other, second)
    dcp.save({"model": values, key: state}, checkpoint_id=tmp_path / "c")
    model, engine, optimizer = build(seed=2, make=adamw, model=double)
    assert load(engine, tmp_path / "c", optimizer) is None
    same(whole(engine, optimizer), by_name(other, second))
    train(model, optimizer, rank, range(2, 3))


@ranks(2)
def test_what_ddp_has_saved_loads(rank, tmp_path):
    """As plain state dicts: with the wrapper's prefix, and numbers for names."""
    inner, second = plain()
    other = DistributedDataParallel(inner)
    train(other, second, rank)
    dcp.save({"model": other.state_dict(), "optimizer": second.state_dict()}, checkpoint_id=tmp_path / "c")
    _, engine, optimizer = build(seed=2, make=adamw, model=double)
    load(engine, tmp_path / "c", optimizer)
    same(whole(engine, optimizer), by_name(inner, second))


@ranks(2)
def test_the_form_of_torchtitan_loads(rank, tmp_path):
    """The model at the top, the optimizer's state flattened, settings by parameter."""
    other, second = plain()
    train(other, second, 0)
    options = StateDictOptions(flatten_optimizer_state_dict=True)
    values, state = get_state_dict(other, second, options=options)
    dcp.save({**values, "optimizer": state, "train_state": {"step": 2}}, checkpoint_id=tmp_path / "c")
    _, engine, optimizer = build(seed=2, make=adamw, model=double)
    load(engine, tmp_path / "c", optimizer)
    same(whole(engine, optimizer), by_name(other, second))


@ranks(2)
def test_an_application_state_of_torchs_recipe_loads(rank, tmp_path):
    other, second = plain()
    train(other, second, 0)
    values, state = get_state_dict(other, second)
    dcp.save({"app": {"model": values, "optim": state}}, checkpoint_id=tmp_path / "c")
    _, engine, optimizer = build(seed=2, make=adamw, model=double)
    load(engine, tmp_path / "c", optimizer)
    same(whole(engine, optimizer), by_name(other, second))


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


@ranks(2)
def test_dcp_itself_loads_ours_into_shard_tensors(rank, tmp_path):
    _model, engine, optimizer = trained(rank)
    save(engine, tmp_path / "c", optimizer)
    model, other, _ = build(seed=2, model=double, make=adamw)
    dcp.load({"model": model.state_dict()}, checkpoint_id=tmp_path / "c")
    same(whole(other), whole(engine))
