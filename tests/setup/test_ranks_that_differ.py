"""Ranks that do different things, or nothing any more, are an error on every rank in time, never a hang.

The rank pool checks after every test that the default process group still works.
"""

from __future__ import annotations

import os
import time

import pytest
import torch
import torch.distributed as dist

import torch_shard
from tests.support import bad_input_helpers
from tests.support.bad_input_helpers import Net, all_ranks_agree_on, small, step
from tests.support.marks import exhaustive
from tests.support.ranks import ranks, run
from torch_shard.errors import DivergenceError, MissingRankError, ShardError


def names_a_line(text):
    """Whether an error says which line of the user's code, which is this file or the model's, a rank was at."""
    return any(f"{file}:" in text for file in (__file__, bad_input_helpers.__file__))


ORDERS = {  # and the unit that only the last rank runs then, or that it leaves out
    "swapped": (["first", "right", "left", "last"], "right"),
    "skipped": (["first", "right", "last"], "right"),
    "more": (["first", "left", "right", "last", "left"], "left"),
    "fewer": (["first", "left", "right"], "right"),
}


# In the first step every gather is agreed upon; by the fifth the ranks follow what they remember, and learn of a
# difference once both have waited for a second.
@pytest.mark.parametrize("when", [0, *exhaustive(4)], ids=["first", "fifth"])
@pytest.mark.parametrize("change", ORDERS)
@ranks(2, exhaustive=(3,))
def test_ranks_that_run_different_units_are_an_error_before_the_step(rank, world_size, when, change):
    model = Net()
    usual, (other, named) = model.order, ORDERS[change]
    torch_shard.shard(model, **small)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(when):
        step(model, optimizer)
    before = [p.to_local().clone() for p in model.parameters()]
    model.order = other if rank == world_size - 1 else usual
    with pytest.raises(DivergenceError) as caught:
        step(model, optimizer)
    text = str(caught.value)
    for p, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(p.to_local(), old), "an optimizer step was made"
    assert f"rank {world_size - 1}" in text
    assert named in text
    assert names_a_line(text)
    assert all_ranks_agree_on(text)
    # Where no rank was left alone in a collective the engine goes on; otherwise it says so, and a new one works.
    model.order = usual
    optimizer.zero_grad()
    if when == 0:
        step(model, optimizer)
    else:
        with pytest.raises(DivergenceError, match="earlier error"):
            step(model, optimizer)
        model = Net()
        torch_shard.shard(model, **small)
        step(model)


@pytest.mark.parametrize("when", [0, *exhaustive(4)], ids=["first", "fifth"])
@ranks(2)
def test_different_units_without_gradients_are_an_error(rank, world_size, when):
    model = Net()
    torch_shard.shard(model, **small)
    with torch.no_grad():
        for _ in range(when):
            model(torch.ones(2, 4))
        if rank == 1:
            model.order = ["first", "right", "left", "last"]
        with pytest.raises(DivergenceError, match=r"rank 1.*right"):
            model(torch.ones(2, 4))
            model(torch.ones(2, 4))  # at the latest when the next forward begins
    assert all_ranks_agree_on("error")


@pytest.mark.exhaustive
@ranks(2)
def test_an_operation_that_one_rank_alone_runs_while_the_other_trains_is_an_error_on_both(rank):
    model = Net()
    torch_shard.shard(model, alone="error", **small)
    step(model)
    with pytest.raises((DivergenceError, MissingRankError), match=r"left\.weight") as caught:
        if rank == 0:
            model.left.weight.norm()
        step(model)
    assert names_a_line(str(caught.value))
    dist.barrier()


@ranks(2)
def test_a_unit_that_only_one_rank_uses_is_an_error(rank):
    model = Net()
    torch_shard.shard(model, **small)
    with pytest.raises(DivergenceError, match="left"):
        loss = model.first(torch.ones(2, 4)).sum()
        if rank == 0:
            loss = loss + model.left(torch.ones(2, 4)).sum()
        loss.backward()
    assert all_ranks_agree_on("error")


@ranks(2)
def test_uneven_numbers_of_validation_batches_are_an_error(rank):
    model = Net()
    torch_shard.shard(model, alone="error", **small)
    step(model)
    seen = 0
    error = None
    try:
        with torch.no_grad():
            for _ in range(3 - rank):
                model(torch.ones(2, 4))
                seen += 1
        step(model)  # rank 1 is through, and trains
    except ShardError as problem:
        error = problem
    assert seen == 2, "the batches that both have"
    assert isinstance(error, (DivergenceError, MissingRankError)), error
    assert "forward" in str(error)
    dist.barrier()


# -- ranks that die -----------------------------------------------------------------------------------------------------


def dies(rank, world_size, how):
    model = Net()
    torch_shard.shard(model, **{**small, "timeout": 5.0})
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, optimizer)
    if rank == 1:
        if how == "in forward":
            model.right.register_forward_pre_hook(lambda *_: os._exit(1))
        elif how == "in backward":
            model.right.weight.register_hook(lambda *_: os._exit(1))
        else:
            os._exit(1)
    start = time.monotonic()
    try:
        for _ in range(2):
            step(model, optimizer)
    except ShardError as error:
        return time.monotonic() - start, type(error).__name__, str(error)
    return None


@pytest.mark.parametrize("how", ["in backward", *exhaustive("in forward", "between steps")])
def test_a_rank_that_dies_does_not_hang_the_others(how):
    survivor, _ = run(2, dies, how, may_die=(1,), group_timeout=10, timeout=30)
    assert survivor is not None
    seconds, kind, text = survivor
    assert seconds < 8
    assert kind == "MissingRankError"
    assert "rank 0" in text or "rank 1" in text


class FailsInBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ValueError("on this rank only")


@ranks(2, timeout=60, fresh=True)
def test_a_batch_skipped_on_one_rank_after_reductions_had_begun_is_an_error_from_then_on(rank):
    """Units of one size: a later reduction would pair with what the failed backward has left, and give wrong gradients."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(*[torch.nn.Linear(8, 8) for _ in range(4)])
    torch_shard.shard(model, units=[torch.nn.Linear], timeout=5.0)
    outcomes = []
    for i in range(4):
        handle = None
        if i == 1 and rank == 1:
            handle = model[1].register_forward_pre_hook(lambda _, args: (FailsInBackward.apply(args[0]),))
        try:
            model(torch.randn(4, 8)).sum().backward()
            outcomes.append("ok")
        except (ValueError, DivergenceError) as error:
            outcomes.append(type(error).__name__)
        if handle is not None:
            handle.remove()
    assert outcomes == ["ok", "ValueError" if rank == 1 else "DivergenceError", "DivergenceError", "DivergenceError"]
