"""State that torch's for-loop takes and its fused kernels don't: where torch has the choice, it is stepped as by torch."""

from __future__ import annotations

import copy

import pytest
import torch

import torch_shard
from tests.compat.harness import MLP, Pair, batch, plain_backward
from tests.optim.helpers import backward_both, both, go, same_optimizers
from tests.support.marks import exhaustive
from tests.support.ranks import ranks

O = torch.optim


def _none_as_momentum(optimizer, params):
    optimizer.state[params[2]]["momentum_buffer"] = None


def _another_entry(optimizer, params):
    optimizer.state[params[2]].clear()
    optimizer.state[params[2]]["note"] = "reset"


def _no_state(optimizer, params):
    del optimizer.state[params[2]]


def _momentum_in_double(optimizer, params):
    for p in params[2:]:
        optimizer.state[p]["momentum_buffer"] = optimizer.state[p]["momentum_buffer"].double()


@pytest.mark.parametrize("edit", [*exhaustive(_none_as_momentum, _another_entry), _no_state, _momentum_in_double])
@ranks(2)
def test_momentum_that_a_fused_kernel_does_not_take(rank, world_size, edit):
    make = lambda m: O.SGD(m.parameters(), lr=0.1, momentum=0.9)  # noqa: E731
    double = edit is not _momentum_in_double
    pair = Pair(MLP, rank, world_size, double=double, optimizer=make)
    x = [batch(rank, step).to(torch.float64 if double else torch.float32) for step in range(4)]
    tolerance = {} if double else {"rtol": 1e-5, "atol": 1e-6}
    for step in range(4):
        if step == 1:
            for _, optimizer in both(pair):
                edit(optimizer, optimizer.param_groups[0]["params"])
        pair.backward(plain_backward, x[step])
        pair.update()
        same_optimizers(pair.optimizer, pair.plain_optimizer, **tolerance)


@ranks(2)
def test_counters_that_a_fused_kernel_does_not_take(rank, world_size):
    pair = Pair(MLP, rank, world_size, optimizer=lambda m: O.AdamW(m.parameters(), lr=0.01))
    go(pair, 0, 2)
    for _, optimizer in both(pair):
        for p in optimizer.param_groups[0]["params"][1:]:
            optimizer.state[p]["step"] = optimizer.state[p]["step"].double()
    go(pair, 2, 2)


@ranks(2)
def test_state_from_before_the_model_was_converted(rank, world_size):
    torch.manual_seed(0)
    model = MLP()
    plain = copy.deepcopy(model)
    optimizer, plain_optimizer = (O.Adagrad(m.parameters(), lr=0.1) for m in (model, plain))
    pair = Pair.__new__(Pair)  # of a model whose optimizer is older
    pair.rank, pair.world_size = rank, world_size
    pair.model, pair.plain = model.double(), plain.double()
    pair.optimizer, pair.plain_optimizer = optimizer, plain_optimizer
    torch_shard.shard(model, unit_bytes=500, timeout=20.0)
    for step in range(3):
        backward_both(pair, step)
        pair.update()
        same_optimizers(optimizer, plain_optimizer, rtol=1e-6, atol=1e-7)
