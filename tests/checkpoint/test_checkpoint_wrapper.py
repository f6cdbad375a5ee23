"""Layers inside torch's ``checkpoint_wrapper`` have the names that they have without it, wherever state is saved or kept."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import torch_shard
from tests.checkpoint.helpers import build, comes_back
from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from torch_shard import optim_state
from torch_shard.checkpoint.format.manifest import read_manifest
from torch_shard.checkpoint.tools.verify import verify

NAMES = ["0.weight", "0.bias", "2.weight", "2.bias"]


def bare() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def wrapped() -> nn.Sequential:
    model = bare()
    model[0] = checkpoint_wrapper(model[0])
    return model


def adam(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=0.1)


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    dtype = next(model.parameters()).dtype
    for step in range(steps):
        optimizer.zero_grad()
        model(torch.full((3, 4), 1.0 + step, dtype=dtype)).square().mean().backward()
        optimizer.step()


def trained(model: Any = wrapped) -> tuple[nn.Module, torch_shard.Engine, torch.optim.Optimizer]:
    made = build(make=adam, model=model)
    train(made[0], made[2])
    return made


@ranks(2)
def test_close_keeps_the_optimizers_state(rank):
    torch.manual_seed(0)
    plain = wrapped()
    model = copy.deepcopy(plain)
    engine = torch_shard.shard(model, timeout=20.0)
    reference, optimizer = adam(plain), adam(model)
    train(plain, reference)
    train(model, optimizer)
    engine.close(optimizer)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        assert optimizer.state[p].keys() == reference.state[q].keys()
    train(plain, reference, 1)
    train(model, optimizer, 1)
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p, q)


@pytest.mark.parametrize(("saved", "loaded"), [(wrapped, wrapped), *exhaustive((wrapped, bare), (bare, wrapped))])
@ranks(2)
def test_a_sharded_checkpoint_does_not_know_the_wrapper(rank, saved, loaded, tmp_path):
    _model, engine, optimizer = trained(saved)
    engine.save(tmp_path / "c", optimizer)
    manifest = read_manifest(tmp_path / "c")
    assert [row["name"] for row in manifest.parameters] == NAMES
    assert sorted(name for unit in manifest.units for name in unit["parameters"]) == sorted(NAMES)
    assert not list(verify(tmp_path / "c"))
    comes_back(tmp_path / "c", engine, optimizer, make=adam, model=loaded)
    # State becomes the parameters' dtype where that is asked for.
    model, other, second = build(make=adam, model=lambda: loaded().bfloat16())
    other.load(tmp_path / "c", second, dtype=torch.bfloat16)
    assert {second.state[p]["exp_avg"].dtype for p in model.parameters()} == {torch.bfloat16}
    train(model, second, 1)


@ranks(2)
def test_names_and_numbers_are_exchanged(rank):
    model, _, optimizer = trained()
    by_name = optim_state.full_optim_state_dict(model, optimizer, rank0_only=False)
    kinds = optim_state.OptimStateKeyType
    by_number = optim_state.rekey_optim_state_dict(by_name, kinds.PARAM_ID, model, optim=optimizer)
    assert list(by_number["state"]) == [0, 1, 2, 3]
    again = optim_state.rekey_optim_state_dict(by_number, kinds.PARAM_NAME, model, optim=optimizer)
    assert list(again["state"]) == list(by_name["state"]) == NAMES


@ranks(2)
def test_a_checkpoint_whose_optimizer_has_the_wrappers_names_still_loads(rank, tmp_path):
    _model, engine, optimizer = trained()
    engine.save_full(tmp_path / "c.pt", optimizer)
    dist.barrier()
    saved = torch.load(tmp_path / "c.pt")
    names = [name for name, _ in wrapped().named_parameters()]
    state = saved["optimizer"]
    state["state"] = {names[n]: own for n, own in state["state"].items()}
    state["param_groups"][0]["params"] = names
    torch.save(saved, tmp_path / f"{rank}.pt")
    dist.barrier()
    comes_back(tmp_path / "0.pt", engine, optimizer, make=adam, model=wrapped)
