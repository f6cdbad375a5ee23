"""Each parameter's step counter follows the counter of the run in which it is stepped."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from torch_shard.optim.elementwise.step_counters import Counters


class Counting(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.operations: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations.append(func._opname)
        return func(*args, **(kwargs or {}))


def paired(runs: int, dtype: torch.dtype = torch.float32) -> tuple[Counters, list[torch.Tensor], list[torch.Tensor]]:
    """Return counters of `runs` runs with one, two, ... parameters, their leaders, and the parameters' counters."""
    leaders = [torch.tensor(0.0) for _ in range(runs)]
    followers = [[torch.tensor(0.0, dtype=dtype) for _ in range(n + 1)] for n in range(runs)]
    counters = Counters()
    counters.pair(
        ({"step": leader}, [{"step": own} for own in members])
        for leader, members in zip(leaders, followers, strict=True)
    )
    return counters, leaders, [own for members in followers for own in members]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_each_counter_has_the_value_of_its_run(dtype):
    counters, leaders, followers = paired(3, dtype)
    for n, leader in enumerate(leaders):
        leader += n + 5
    assert not counters.are_as_left()
    counters.follow()
    assert [own.item() for own in followers] == [5, 6, 6, 7, 7, 7] and counters.are_as_left()
    followers[1] += 1
    assert not counters.are_as_left()


def test_counters_of_many_runs_take_no_more_operations_than_those_of_two():
    found = []
    for runs in (2, 9):
        counters, *_ = paired(runs)
        with Counting() as mode:
            counters.follow()
        found.append(mode.operations)
    assert found[0] == found[1] and len(found[0]) <= 2
