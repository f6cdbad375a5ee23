"""Layers inside torch's ``checkpoint_wrapper`` have the names that they have without it, wherever state is saved or kept."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import torch_shard
from tests.checkpoint.helpers import same, whole
from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from torch_shard import optim_state
from torch_shard.checkpoint.format.manifest import read_manifest
from torch_shard.checkpoint.tools.verify import verify


def build(wrapped: bool = True, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2)).to(dtype)
    if wrapped:
        model[0] = checkpoint_wrapper(model[0])
    return model


def sharded(model: nn.Module) -> tuple[nn.Module, torch_shard.Engine, torch.optim.Optimizer]:
    engine = torch_shard.shard(model, timeout=20.0)
    return model, engine, torch.optim.Adam(model.parameters(), lr=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    dtype = next(model.parameters()).dtype
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.full((3, 4), 1.0 + step, dtype=dtype)).square().mean().backward()
        optimizer.step()


@ranks(2)
def test_close_keeps_the_optimizers_state(rank):
    plain = build()
    reference = torch.optim.Adam(plain.parameters(), lr=0.1)
    model, engine, optimizer = sharded(build())
    train(plain, reference)
    train(model, optimizer)
    engine.close(optimizer)
    assert {k: set(v) for k, v in enumerate(map(optimizer.state.get, model.parameters()))} == {
        k: set(v) for k, v in enumerate(map(reference.state.get, plain.parameters()))
    }
    train(plain, reference, 1)
    train(model, optimizer, 1)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q)


@pytest.mark.parametrize(("saved", "loaded"), [(True, True), *exhaustive((True, False), (False, True))])
@ranks(2)
def test_a_sharded_checkpoint_does_not_know_the_wrapper(rank, saved, loaded, tmp_path):
    model, engine, optimizer = sharded(build(saved))
    train(model, optimizer)
    engine.save(tmp_path / "c", optimizer)
    manifest = read_manifest(tmp_path / "c")
    rows = [row["name"] for row in manifest.parameters]
    assert rows == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert sorted(name for unit in manifest.units for name in unit["parameters"]) == sorted(rows)
    assert not list(verify(tmp_path / "c"))
    _, other_engine, other_optimizer = sharded(build(loaded))
    other_engine.load(tmp_path / "c", other_optimizer)
    same(whole(other_engine, other_optimizer), whole(engine, optimizer))


@ranks(2)
def test_state_becomes_the_parameters_dtype_where_that_is_asked_for(rank, tmp_path):
    model, engine, optimizer = sharded(build())
    train(model, optimizer)
    engine.save(tmp_path / "c", optimizer)
    model, engine, optimizer = sharded(build(dtype=torch.bfloat16))
    engine.load(tmp_path / "c", optimizer, dtype=torch.bfloat16)
    assert {optimizer.state[p]["exp_avg"].dtype for p in model.parameters()} == {torch.bfloat16}
    train(model, optimizer, 1)


@ranks(2)
def test_names_and_numbers_are_exchanged(rank):
    model, _, optimizer = sharded(build())
    train(model, optimizer)
    by_name = optim_state.full_optim_state_dict(model, optimizer, rank0_only=False)
    kinds = optim_state.OptimStateKeyType
    by_number = optim_state.rekey_optim_state_dict(by_name, kinds.PARAM_ID, model, optim=optimizer)
    assert list(by_number["state"]) == [0, 1, 2, 3]
    again = optim_state.rekey_optim_state_dict(by_number, kinds.PARAM_NAME, model, optim=optimizer)
    assert list(again["state"]) == list(by_name["state"]) == ["0.weight", "0.bias", "2.weight", "2.bias"]


@ranks(2)
def test_a_checkpoint_whose_optimizer_has_the_wrappers_names_still_loads(rank, tmp_path):
    model, engine, optimizer = sharded(build())
    train(model, optimizer)
    engine.save_full(tmp_path / "c.pt", optimizer)
    dist.barrier()
    saved = torch.load(tmp_path / "c.pt")
    names = dict(enumerate(name for name, _ in build().named_parameters()))
    state = saved["optimizer"]
    state["state"] = {names[n]: own for n, own in state["state"].items()}
    state["param_groups"][0]["params"] = list(names.values())
    torch.save(saved, tmp_path / f"{rank}.pt")
    _, other_engine, other_optimizer = sharded(build())
    dist.barrier()
    other_engine.load(tmp_path / "0.pt", other_optimizer)
    same(whole(other_engine, other_optimizer), whole(engine, optimizer))
