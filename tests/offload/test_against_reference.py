"""With offload the numbers are those of the reference, and shards are copied to the device for each gather that it names."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.support import cells, training
from tests.support.examples import many, quick
from tests.support.ranks import run
from torch_shard import Offload

OFFLOADS = [Offload(), Offload(params=False)]
KINDS = ("trainable", "frozen")  # no parameter of such a cell is as large as a shard
strategies = st.sampled_from(["full_shard", "shard_grad_op", "shard_optim"])


class Copies(TorchDispatchMode):
    """Context in which the bytes of this thread's copies of float64 are noted."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[int] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(t not in (torch.Tensor, nn.Parameter) for t in types):
            return NotImplemented
        if func is torch.ops.aten.copy_.default and args[0].dtype is torch.float64:
            self.found.append(args[0].nbytes)
        return func(*args, **(kwargs or {}))


def record(rank: int, world_size: int, case: cells.Case, offload: Offload) -> list[list[int]]:
    return [seen.found for seen in cells.run_passes(rank, case, Copies, offload=offload)]


def hold_order(case: cells.Case, ranks: int, offload: Offload) -> None:
    predicted = [gathers for gathers, _ in cells.predict(case, ranks)]
    made = [cells.Cell(number, kind) for number, kind in enumerate(case.kinds)]
    shards = {nbytes // ranks for cell in made for nbytes, _ in cells.sizes(cell, ranks)}
    if not offload.params:  # what stays on the device is copied there before the first gather
        missing = set(shards)
        for n, gathers in enumerate(predicted):
            first = {gathers.index(nbytes) for nbytes in missing.intersection(gathers)}
            predicted[n] = [nbytes for at, nbytes in enumerate(gathers) for _ in range(1 + (at in first))]
            missing -= set(gathers)
    for rank, recorded in enumerate(run(ranks, record, case, offload)):
        copied = [[nbytes for nbytes in found if nbytes in shards] for found in recorded]
        assert copied == predicted, f"rank {rank}"


def hold_step(ranks: int, offload: Offload, data: st.DataObject) -> None:
    chosen = (("strategy", data.draw(strategies)), ("offload", offload))
    case = data.draw(training.cases(ranks, settings=chosen))
    training.same(run(ranks, training.train, case), case)


@pytest.mark.parametrize("ranks", [1, 2])
@quick(4)
@given(st.data())
def test_shards_are_copied_to_the_device_in_the_order_of_the_references_gathers(
    ranks: int, data: st.DataObject
) -> None:
    hold_order(data.draw(cells.cases(ranks, KINDS)), ranks, OFFLOADS[0])


@pytest.mark.parametrize("offload", OFFLOADS, ids=["all", "shards kept"])
@quick(4)
@given(st.data())
def test_a_random_training_with_offload_is_that_of_the_reference(offload: Offload, data: st.DataObject) -> None:
    hold_step(2, offload, data)


@pytest.mark.parametrize("offload", OFFLOADS, ids=["all", "shards kept"])
@pytest.mark.parametrize("ranks", [1, 2, 3])
@many(100)
@given(st.data())
def test_many_random_trainings_with_offload(ranks: int, offload: Offload, data: st.DataObject) -> None:
    hold_order(data.draw(cells.cases(ranks, KINDS)), ranks, offload)
    hold_step(ranks, offload, data)
