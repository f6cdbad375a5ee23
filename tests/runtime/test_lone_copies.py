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
from tests.support.marks import exhaustive
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


@pytest.mark.parametrize("changed", ["the original", *exhaustive("the copy")])
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
        with pytest.raises(DivergenceError, match="does not have this model") as caught:
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


@pytest.mark.parametrize("makers", [*exhaustive("all ranks"), "one rank"])
@ranks(2)
def test_a_copy_does_not_have_what_was_loaded_into_the_original_since(rank: int, makers: str) -> None:
    sharded, engine, plain = made(timeout=4.0, alone_after=0.1)
    state = {key: value.clone() for key, value in plain.state_dict().items()}
    engine.load_state_dict(state)
    mine = copy.deepcopy(sharded) if makers == "all ranks" or rank == 0 else None
    engine.load_state_dict({key: value * 2 if value.is_floating_point() else value for key, value in state.items()})
    if rank != 0:
        time.sleep(1.5)
    elif makers == "all ranks":
        same(values(mine), values(plain))
    else:
        with pytest.raises(DivergenceError, match="does not have this model"):
            values(mine)
    dist.barrier()


@ranks(2)
def test_a_copy_keeps_the_full_tensors_that_its_rank_has_put_in(rank: int) -> None:
    sharded, _, plain = made(alone_after=0.1)
    found = []
    for model in (sharded, plain) if rank == 0 else ():
        before = [p.detach().clone() for p in model.parameters()]
        average = [torch.full(p.shape, 0.5) for p in model.parameters()]
        for p, value in zip(model.parameters(), average, strict=True):
            p.data.copy_(value)
        mine = copy.deepcopy(model)
        for p, value in zip(model.parameters(), before, strict=True):
            p.data.copy_(value)
        for value in average:
            value.fill_(7)  # for the next one
        found.append(values(mine))
    if found:
        same(*found)
    dist.barrier()


@ranks(2)
def test_copies_of_a_model_that_one_rank_has_edited_differ_between_the_ranks(rank: int) -> None:
    sharded, _, plain = made(alone_after=0.5)
    found = []
    for model in (sharded, plain):
        before = [p.detach().clone() for p in model.parameters()]
        average = [torch.full(p.shape, 0.5) for p in model.parameters()]
        if rank == 0:
            for p, value in zip(model.parameters(), average, strict=True):
                p.data.copy_(value)
        mine = copy.deepcopy(model)
        if rank == 0:
            for p, value in zip(model.parameters(), before, strict=True):
                p.data.copy_(value)
        found.append(values(mine))
    same(*found)
    dist.barrier()
