"""Deep copies of a sharded model, which one rank alone may make and read."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.runtime.test_lone_reads import file_of, made, same, train, values
from tests.support.ranks import ranks
from torch_shard.errors import DivergenceError


@pytest.mark.parametrize("of", ["the model", "a copy"])
@ranks(2, exhaustive=(3,))
def test_a_copy_that_only_this_rank_has_made_is_read_from_the_original(rank: int, of: str) -> None:
    sharded, _, plain = made()
    train(sharded, torch.optim.SGD(sharded.parameters(), lr=0.1))
    train(plain, torch.optim.SGD(plain.parameters(), lr=0.1))
    for _ in range(2):
        if rank == 0:
            mine = copy.deepcopy(sharded if of == "the model" else copy.deepcopy(sharded))
            same(values(mine), values(plain))
            same(file_of(mine), plain.state_dict())
        else:
            time.sleep(0.5)
        for model in (sharded, plain):
            train(model, torch.optim.SGD(model.parameters(), lr=0.1))
        together = copy.deepcopy(sharded), copy.deepcopy(plain)
        same(values(together[0]), values(together[1]))


@pytest.mark.parametrize("changed", ["the original", "the copy"])
@ranks(2)
def test_a_copy_that_only_this_rank_has_made_is_named_once_values_differ_from_those_of_the_original(
    rank: int, changed: str
) -> None:
    sharded, _, _ = made(timeout=4.0)
    mine = copy.deepcopy(sharded) if rank == 0 else None
    if changed == "the original":
        train(sharded, torch.optim.SGD(sharded.parameters(), lr=0.1))
    if mine is not None:
        if changed == "the copy":
            with torch.no_grad():
                mine.scale.mul_(2)
        with pytest.raises(DivergenceError, match="no such model") as caught:
            values(mine)
        if changed == "the original":  # there the lines of both ranks say why
            assert "rank 1 has already made the next one, at " in str(caught.value)
    else:
        time.sleep(2)  # the reader waits for a copy that might still be made here
    train(sharded, torch.optim.SGD(sharded.parameters(), lr=0.1))


def weight(model: nn.Module) -> torch.Tensor:
    return model.scale @ torch.ones(3)


@pytest.mark.parametrize("read", [values, weight], ids=["a forward", "a parameter with gradients"])
@ranks(2, exhaustive=(3,))
def test_a_rank_that_reads_one_copy_does_not_meet_one_that_reads_another(
    rank: int, read: Callable[[nn.Module], torch.Tensor]
) -> None:
    sharded, _, plain = made(alone_after=30.0)
    copies = [[copy.deepcopy(model) for _ in range(2)] for model in (sharded, plain)]
    for first, second in copies:
        with torch.no_grad():
            first.scale.mul_(2)
            second.scale.mul_(3)
    dist.barrier()
    if rank != 0:
        dist.recv(torch.zeros(1), 0)  # so rank 0 reads the first copy alone
    for ours, theirs in zip(*copies, strict=True):
        same(read(ours), read(theirs))
        if rank == 0 and ours is copies[0][0]:
            for other in range(1, dist.get_world_size()):
                dist.send(torch.zeros(1), other)
