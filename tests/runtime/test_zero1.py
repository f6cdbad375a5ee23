"""``shard_optim``: parameters stay gathered until an optimizer changes them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn

import torch_shard
from tests.compat.harness import MLP, Pair, batch, loss_of, plain_backward, same, same_params, train_both
from tests.support.ranks import ranks


def sent_by(engine: torch_shard.Engine, function: Callable[[], Any]) -> int:
    before = engine.bytes_sent
    function()
    return engine.bytes_sent - before


def of_ddp(model: nn.Module, world_size: int) -> float:
    """Bytes of an all-reduce of all gradients."""
    return 2 * sum(p.numel() * p.element_size() for p in model.parameters()) * (world_size - 1) / world_size


@ranks(2, exhaustive=(4,))
def test_a_step_of_several_micro_batches_sends_what_ddp_does(rank, world_size):
    torch.manual_seed(0)
    model = MLP(width=64)
    engine = torch_shard.shard(model, strategy="shard_optim", unit_bytes=20000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        with engine.no_sync():
            for i in range(3):
                loss_of(model(batch(rank, i).float())).backward()
        loss_of(model(batch(rank, 3).float())).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    for _ in range(2):
        assert sent_by(engine, step) <= 1.01 * of_ddp(model, world_size)


@ranks(2)
def test_nothing_is_gathered_while_nothing_changes(rank):
    torch.manual_seed(0)
    model = MLP()
    engine = torch_shard.shard(model, strategy="shard_optim", unit_bytes=300)
    x = batch(rank, 0).float()

    def evaluate() -> None:
        with torch.no_grad():
            model(x)

    first = sent_by(engine, evaluate)
    assert first > 0 and sent_by(engine, evaluate) == 0
    forward = sent_by(engine, lambda: loss_of(model(x)).backward())
    assert 0 < forward <= first * 1.01  # the reduction alone, of as many elements
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)
    assert sent_by(engine, evaluate) == first


@ranks(2, exhaustive=(3,))
def test_what_is_frozen_is_gathered_once(rank, world_size):
    def build() -> nn.Module:
        model = MLP()
        for name, p in model.named_parameters():
            p.requires_grad_(not name.startswith("blocks"))
        return model

    pair = Pair(
        build, rank, world_size, strategy="shard_optim", units=[["inp.weight", "inp.bias"], ["blocks.0.up.weight"]]
    )
    frozen = next(u for u in pair.engine.units if "blocks.0.up.weight" in u.names)
    gathered = []
    for step in range(3):
        pair.step(plain_backward, batch(rank, step))
        gathered.append(frozen.state.value)
    assert gathered == ["full"] * 3
    pair.check()


class Small(nn.Module):
    """Units of which most ranks have no part."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.full((1,), 1.0 + i)) for i in range(3)])

    def forward(self, x):
        for scale in self.scales:
            x = (x * scale).tanh()
        return x


@ranks(3, exhaustive=(2, 4))
def test_ranks_without_a_part_of_a_unit_gather_it_with_the_others(rank, world_size):
    units = [[f"scales.{i}"] for i in range(3)]
    train_both(Small, rank, world_size, steps=4, strategy="shard_optim", units=units)
    train_both(
        Small, rank, world_size, steps=3, strategy="shard_optim", units=units,
        optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=0.01),
    )  # fmt: skip


def halve(model: nn.Module) -> None:
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(0.5)


def _same_outputs(pair: Pair, x: torch.Tensor) -> None:
    for grad in (False, True):
        with torch.set_grad_enabled(grad):
            same(*pair.each(lambda m: m(x)))


@ranks(2)
def test_edits_between_steps_count(rank, world_size):
    """Of every kind: on the slices, gathered, loaded, copied."""
    pair = Pair(MLP, rank, world_size, strategy="shard_optim")
    x = batch(rank, 9)

    def compare() -> None:
        _same_outputs(pair, x)
        same_params(pair.model, pair.plain)

    compare()
    pair.each(halve)
    compare()
    with pair.engine.gathered(write=True):
        halve(pair.model)
    halve(pair.plain)
    compare()
    state = {k: v + 1 for k, v in pair.plain.state_dict().items()}
    pair.engine.load_state_dict(state)
    pair.plain.load_state_dict(state)
    compare()
    twin = copy.deepcopy(pair.model)
    halve(twin)
    with torch.no_grad():
        assert not torch.equal(twin(x), pair.model(x))
    compare()
    pair.step(plain_backward, batch(rank, 1))
    compare()


@ranks(2)
def test_edits_that_leave_no_trace_count(rank, world_size):
    """Written on one rank for all; by a collective, past autograd, through NumPy, on the memory itself."""
    pair = Pair(MLP, rank, world_size, strategy="shard_optim")
    x = batch(rank, 9)

    _same_outputs(pair, x)
    with pair.engine.gathered(ranks=0, write=True):
        if rank == 0:
            halve(pair.model)
    halve(pair.plain)
    _same_outputs(pair, x)
    for edit in (
        lambda local: local.data.mul_(0.5),
        lambda local: np.multiply(local.numpy(), 0.5, out=local.numpy()),
        lambda local: local.mul_(0.5) if local.numel() else None,
    ):
        for p in pair.model.parameters():
            edit(p.to_local())
        halve(pair.plain)
        _same_outputs(pair, x)
    for p in pair.model.parameters():
        dist.all_reduce(p.to_local()[:0])  # nothing, but the same number of calls on all ranks
    pair.step(plain_backward, batch(rank, 1))
    _same_outputs(pair, x)


@ranks(2)
def test_an_edit_between_forwards_of_a_submodule_counts(rank, world_size):
    pair = Pair(MLP, rank, world_size, strategy="shard_optim")
    x = torch.ones(2, 5, dtype=torch.float64)
    for _ in range(3):
        with torch.no_grad():
            same(*pair.each(lambda m: m.inp(x)))
            pair.each(lambda m: m.inp.weight.mul_(0.5))


@ranks(2)
def test_an_edit_that_leaves_no_trace_counts_in_the_next_recorded_forward_of_a_submodule(rank, world_size):
    pair = Pair(MLP, rank, world_size, strategy="shard_optim")
    x = torch.ones(2, 5, dtype=torch.float64)
    for _ in range(3):
        same(*pair.each(lambda m: m.inp(x)))
        for p in pair.model.parameters():
            p.to_local().data.mul_(0.5)
        halve(pair.plain)


@pytest.mark.exhaustive
@ranks(2)
def test_a_full_state_dict_leaves_nothing_gathered(rank, world_size):
    pair = Pair(MLP, rank, world_size, strategy="shard_optim")
    pair.step(plain_backward, batch(rank, 0))
    pair.engine.state_dict(form="full")
    assert {unit.state.value for unit in pair.engine.units} == {"sharded"}
    pair.train(1)


@ranks(2)
def test_an_edit_on_one_rank_alone_is_gathered_on_all(rank, world_size):
    torch.manual_seed(0)
    model = Small()
    torch_shard.shard(model, strategy="shard_optim", units=[[f"scales.{i}"] for i in range(3)])
    x = torch.ones(2)
    with torch.no_grad():
        model(x)
        if model.scales[1]._spec.length:  # one rank has it, and the other does not even look
            model.scales[1].to_local().mul_(2.0)
        found = model(x)
        plain = Small()
        plain.scales[1].mul_(2.0)
        assert torch.equal(found, plain(x))
