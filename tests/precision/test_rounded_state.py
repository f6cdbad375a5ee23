"""Optimizer state of rounded parameters is fp32, and comes back so."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torch_shard
from tests.compat.harness import batch, loss_of, whole
from tests.precision.harness import same_bits
from tests.precision.rounding_harness import (
    BF16,
    FP32,
    ROUND,
    Exact,
    O,
    Whole2D,
    _of_kind,
    adamw,
    go,
    mlp,
    same_values,
    sgd,
    train,
    wholes,
)
from tests.support.marks import exhaustive
from tests.support.ranks import ranks

# -- state ------------------------------------------------------------------------------------------------------------


def moments(model: nn.Module, optimizer: Any) -> dict[str, torch.Tensor]:
    return {
        f"{name} {key}": whole(value).clone()
        for name, p in model.named_parameters()
        for key, value in optimizer.state[p].items()
    }


def same_moments(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert value.dtype == FP32
        same_bits(ours[name], value, name)


def _by_torch(engine: Any, optimizer: Any, path: Any) -> Callable[[Any, Any], None]:
    saved = copy.deepcopy(optimizer.state_dict())
    return lambda engine, optimizer: optimizer.load_state_dict(saved)


def _by_name(engine: Any, optimizer: Any, path: Any) -> Callable[[Any, Any], None]:
    saved = engine.optim_state_dict(optimizer, rank0_only=False)
    return lambda engine, optimizer: engine.load_optim_state_dict(optimizer, saved)


def _by_checkpoint(engine: Any, optimizer: Any, path: Any) -> Callable[[Any, Any], None]:
    engine.save(path / "sharded", optimizer)
    return lambda engine, optimizer: engine.load(path / "sharded", optimizer)


def _by_full_checkpoint(engine: Any, optimizer: Any, path: Any) -> Callable[[Any, Any], None]:
    engine.save_full(path / "full.pt", optimizer)
    dist.barrier()
    return lambda engine, optimizer: engine.load(path / "full.pt", optimizer)


@pytest.mark.exhaustive
@ranks(2)
@pytest.mark.parametrize("way", [_by_torch, *exhaustive(_by_name), _by_checkpoint, *exhaustive(_by_full_checkpoint)])
@pytest.mark.parametrize("used", [False, *exhaustive(True)])
def test_saved_state_comes_back_in_fp32(way, used, rank, tmp_path):
    """Into an optimizer that has stepped before, or has not."""
    model, engine, optimizer = train(rank, adamw)
    load, kept = way(engine, optimizer, tmp_path), moments(model, optimizer)
    other, engine, optimizer = train(rank, adamw, 2 if used else 0)
    load(engine, optimizer)
    same_moments(moments(other, optimizer), kept)
    go(other, optimizer, rank, range(1))
    assert all(value.dtype == FP32 for value in moments(other, optimizer).values())


@ranks(2)
def test_state_of_whole_matrices_comes_back_in_fp32_by_torchs_own_dict(rank):
    make = functools.partial(_of_kind, O.Muon)
    _, engine, optimizer = train(rank, make, build=lambda: Whole2D().to(BF16))
    kept = engine.optim_state_dict(optimizer, rank0_only=False)["state"]
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for name, entries in engine.optim_state_dict(optimizer, rank0_only=False)["state"].items():
        for key, value in entries.items():
            assert value.dtype == FP32
            same_bits(value, kept[name][key], name)


@pytest.mark.exhaustive
@ranks(2)
def test_state_of_steps_in_bf16_becomes_fp32_at_the_first_step(rank):
    """From a training without rounding; exactly, so that one more step is that of fp32."""
    model, engine, optimizer = train(rank, adamw, 2, precision=None)
    saved = engine.optim_state_dict(optimizer, rank0_only=False)
    assert {v.dtype for v in saved["state"]["inp.weight"].values() if v.dim()} == {BF16}
    values = wholes(model)
    model, engine, optimizer = train(rank, adamw, 0)
    engine.load_state_dict(values)
    engine.load_optim_state_dict(optimizer, saved)
    exact = Exact(model, adamw)
    for name, q in exact.plain.named_parameters():
        own = saved["state"][name.replace("/", ".")]
        exact.optimizer.state[q] = {k: v.float().clone() for k, v in own.items()}
    loss_of(model(batch(rank, 2).to(BF16))).backward()
    exact.step(optimizer)


@pytest.mark.exhaustive
@ranks(2)
def test_a_resumed_training_begins_with_new_random_numbers(rank, tmp_path):
    """They are not in checkpoints: two continuations are equal to each other, but not to an uninterrupted training."""
    model, engine, optimizer = train(rank, sgd, 3)
    engine.save(tmp_path / "checkpoint", optimizer)
    go(model, optimizer, rank, range(3, 5))
    resumed = []
    for _ in range(2):
        other, engine, optimizer = train(rank, sgd, 0)
        engine.load(tmp_path / "checkpoint", optimizer)
        go(other, optimizer, rank, range(3, 5))
        resumed.append(wholes(other))
    assert same_values(*resumed) and not same_values(resumed[0], wholes(model))


# -- a whole training -------------------------------------------------------------------------------------------------


@ranks(2)
def test_state_made_before_the_first_step_takes_what_was_saved(rank, tmp_path):
    """Adagrad makes it in its constructor, in the dtype of the parameters."""

    def made(seed: int) -> tuple[nn.Module, Any, Any]:
        torch.manual_seed(seed)
        model = mlp().bfloat16()
        engine = torch_shard.shard(model, precision=ROUND)
        return model, engine, O.Adagrad(model.parameters(), lr=0.01)

    model, engine, optimizer = made(0)
    go(model, optimizer, rank, range(3))
    engine.save(tmp_path / "c", optimizer)
    again, other, resumed = made(1)
    other.load(tmp_path / "c", resumed)
    same_moments(moments(again, resumed), moments(model, optimizer))
    for p in again.parameters():
        assert resumed.state[p]["sum"].dtype == FP32
