"""Ranks that read different things at the same time: no rank takes another's for its own."""

from __future__ import annotations

import copy
import gc
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torch_shard
from tests.runtime.test_lone_reads import TOKENS, made, same, train, values
from tests.support.ranks import ranks
from torch_shard import Precision

Read = Callable[[torch.Tensor], torch.Tensor]

READS: dict[str, tuple[Read, Read]] = {
    "arguments": (lambda w: w.norm(1), lambda w: w.norm(2)),
    "functions before": (lambda w: w.abs().sum(), lambda w: w.square().sum()),
    "results": (lambda w: w + 0, lambda w: w * 2),
    "numbers": (lambda w: (w * 2).sum(), lambda w: (w * 3).sum()),
}


def plain(value: Any) -> torch.Tensor:
    return value.full_tensor() if isinstance(value, torch_shard.ShardTensor) else value


@pytest.mark.parametrize("of", READS)
@ranks(2)
def test_ranks_that_read_different_results_of_one_parameter_get_their_own(rank: int, of: str) -> None:
    sharded, _, reference = made(alone_after=30.0)
    read = READS[of][rank]
    with torch.no_grad():
        for _ in range(2):
            same(plain(read(sharded.embed.weight)), read(reference.embed.weight))
    dist.barrier()


@ranks(2)
def test_ranks_that_read_different_flat_buffers_of_a_unit_get_their_own(rank: int) -> None:
    torch.manual_seed(3)
    model = nn.ParameterDict({name: nn.Parameter(torch.randn(8, 8)) for name in "ab"})
    model.a.requires_grad_(False)
    expected = {name: p.detach().clone() for name, p in model.items()}
    torch_shard.shard(model, precision=Precision(torch.bfloat16), alone_after=30.0)
    name = "ab"[rank]
    with torch.no_grad():
        same(model[name][5 - rank].clone(), expected[name][5 - rank])
    dist.barrier()


@ranks(2)
def test_a_rank_that_is_late_for_reads_before_the_step_finds_the_values_of_before(rank: int) -> None:
    sharded, engine, reference = made(alone_after=0.1)
    for late in (1, 0):
        found = []
        for model in (sharded, reference):
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            model.train()
            model(TOKENS).square().mean().backward()
            if rank == late and model is sharded:
                time.sleep(0.6)
            with torch.no_grad():
                found.append(tuple(p.norm() for p in model.parameters()))
            optimizer.step()
        same(*found)
    same(engine.state_dict(rank0_only=False), reference.state_dict())


@ranks(2)
def test_a_dropped_model_is_read_by_one_rank_while_the_other_trains_another(rank: int) -> None:
    read, engine, reference = made(alone_after=30.0)
    trained, _, other = made()
    if rank == 1:
        del read, engine
        gc.collect()
    else:
        time.sleep(0.3)  # the other rank has begun to train
        same(values(read), values(reference))
    for model in (trained, other):
        train(model, torch.optim.SGD(model.parameters(), lr=0.1))


@ranks(2)
def test_a_read_with_gradients_does_not_wait_for_a_rank_that_reads_what_this_one_has_still_to_step(rank: int) -> None:
    first, _, plain_first = made(timeout=20.0, alone_after=0.1)
    second, _, plain_second = made(timeout=20.0, alone_after=0.1)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (first, plain_first)]
    for model in (first, plain_first):
        model.train()
        model(TOKENS).square().mean().backward()
    begin = time.monotonic()
    if rank == 0:
        time.sleep(0.3)
        same(second.scale.norm(), plain_second.scale.norm())
    for optimizer in optimizers:
        optimizer.step()
    if rank == 1:
        same(values(first), values(plain_first))
    assert time.monotonic() - begin < 10
    dist.barrier()


@pytest.mark.parametrize("inside", ["a forward", "a copy's forward"])
@ranks(2)
def test_a_forward_inside_gathered_does_not_end_the_read(rank: int, inside: str) -> None:
    sharded, engine, reference = made(alone_after=0.1)
    mine = [copy.deepcopy(model) for model in (sharded, reference)]
    for model in (sharded, reference):
        train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (sharded, reference)]
    for model in (sharded, reference):
        model(TOKENS).square().mean().backward()
    weights = [model.blocks[0][0].weight for model in (sharded, reference)]
    if rank == 0:
        with engine.gathered(sharded.scale), torch.no_grad():
            chosen = (sharded, reference) if inside == "a forward" else mine
            same(*map(values, chosen))
            dist.barrier()
            time.sleep(0.5)  # the other rank would step now
            same(*(weight.norm() for weight in weights))
    else:
        dist.barrier()
    for optimizer in optimizers:
        optimizer.step()
    same(*map(values, (sharded, reference)))
    dist.barrier()
