"""Which random numbers parameters are rounded with: the same wherever they should be."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
import torch.distributed as dist

import torch_shard
from tests.compat.harness import batch, loss_of
from tests.precision.harness import same_bits
from tests.precision.rounding_harness import (
    BF16,
    ROUND,
    O,
    adamw,
    go,
    mlp,
    same_values,
    sgd,
    small_steps,
    train,
    wholes,
)
from tests.support.marks import exhaustive
from tests.support.ranks import ranks


@pytest.mark.exhaustive
@ranks(2)
def test_the_seed_of_the_first_rank_decides(rank):
    runs = [wholes(train(rank, adamw, seed=seed)[0]) for seed in (3, 3 + 5 * rank, 4)]
    assert same_values(runs[0], runs[1])  # the other rank's own seed is not asked for
    assert not same_values(runs[0], runs[2])


@ranks(2, exhaustive=(4,))
def test_replicas_stay_equal_to_the_bit(rank, world_size):
    model, _, _ = train(rank, adamw, 6, strategy="no_shard")
    for name, p in model.named_parameters():
        own = p.to_local().view(torch.int16).clone()
        first = own.clone()
        dist.broadcast(first.view(torch.uint8), 0)
        assert torch.equal(own, first), name


def in_groups(model):
    """Neighbours in memory belong to different groups, so that a step on a shard is made in several places of it."""
    params = list(model.parameters())
    return O.SGD([{"params": params[::2], "lr": 2**-9}, {"params": params[1::2], "lr": 2**-10}])


@ranks(2, exhaustive=(3,))
@pytest.mark.parametrize("make", [in_groups, *exhaustive(sgd, adamw)])
def test_shards_are_rounded_as_the_whole_is(make, rank):
    """With equal gradients the strategy does not show in the numbers, so ranks with different slices draw different ones."""
    sharded = wholes(train(rank, make, alike=True)[0])
    replicated = wholes(train(rank, make, alike=True, strategy="no_shard")[0])
    assert same_values(sharded, replicated)


@ranks(1)
def test_how_a_step_is_divided_does_not_show(rank):
    """Into pieces of 131072 elements, or of a million."""
    n = (1 << 20) + 1000
    ways: list[dict[str, Any]] = [{"foreach": False, "fused": False}, {"foreach": True}, {"fused": True}]
    runs = [small_steps(n, 3, ROUND, functools.partial(O.SGD, lr=1e-3, **way)) for way in ways]
    assert (runs[0] != 1).any()
    for run in runs[1:]:
        same_bits(run, runs[0])
    pieces = runs[0][: 1 << 20].view(8, -1)
    assert all((pieces[i] != pieces[j]).any() for i in range(8) for j in range(i))


@pytest.mark.exhaustive
@ranks(2)
def test_stepping_in_backward_gives_the_same_numbers(rank):
    usual = wholes(train(rank, adamw)[0])
    model, engine, optimizer = train(rank, adamw, 0)
    engine.step_in_backward(optimizer)
    for step in range(4):
        loss_of(model(batch(rank, step).to(BF16))).backward()
    assert same_values(wholes(model), usual)


@ranks(2)
def test_the_users_random_numbers_are_not_touched(rank):
    torch.manual_seed(5)
    model = mlp()
    state = torch.get_rng_state()
    torch_shard.shard(model, unit_bytes=300, precision=ROUND)
    go(model, sgd(model), rank, range(2))
    assert torch.equal(torch.get_rng_state(), state)
