"""Backwards through several sharded models."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import torch_shard
from tests.compat.harness import average_grads, batch, loss_of, same_grads
from tests.compat.modes import as_computed
from tests.ranks import ranks
from torch_shard.errors import DivergenceError


class Shift(nn.Module):
    """Backward needs nothing of it, so only reductions are sent for it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5))

    def forward(self, x):
        return x * x + self.weight


class Part(nn.Module):
    """Two layers of one size; the first one's use can be left out of the graph."""

    def __init__(self):
        super().__init__()
        self.a, self.b = Shift(), Shift()

    def forward(self, x, detached=False):
        y = self.a(x)
        return self.b(x + (y.detach() if detached else y))


def _two(rank):
    torch.manual_seed(0)
    plain = [Part().double() for _ in range(2)]
    sharded = copy.deepcopy(plain)
    for model in plain:
        as_computed(model)
    for model in sharded:
        torch_shard.shard(model, unit_bytes=20, timeout=10.0)
    return plain, sharded


@ranks(2, 3)
def test_one_loss_through_two_models_trains_like_plain(rank, world_size):
    plain, sharded = _two(rank)
    for step in range(3):
        for first, second in (plain, sharded):
            loss_of(second(first(batch(rank, step)))).backward()
        for ours, theirs in zip(sharded, plain, strict=True):
            average_grads(theirs)
            same_grads(ours, theirs)


@ranks(2)
def test_a_loss_that_mixes_two_models_in_another_order_on_one_rank_is_an_error(rank, world_size):
    _, (first, second) = _two(rank)
    with pytest.raises(DivergenceError, match="mixed the collectives of several models"):
        for step in range(3):
            loss_of(second(first(batch(rank, step)), detached=rank == 1)).backward()
