"""What pictures of a planned step are made of."""

from __future__ import annotations

import math
import re
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torch_shard.plan.pictures import highest_moments, streams_plot, tiles, waits_in, waits_table
from torch_shard.plan.plan import Plan
from torch_shard.plan.roofline import Timeline
from torch_shard.plan.step_trace import Allocation, Free, StepTrace


@given(st.lists(st.integers(1, 10**9), min_size=1, max_size=60))
def test_tiles_fill_the_whole_with_areas_as_bytes(sizes: list[int]) -> None:
    units: Any = [SimpleNamespace(nbytes=size) for size in sorted(sizes, reverse=True)]
    found = list(tiles(units, 0.0, 0.0, 1.0, 1.0))
    assert [unit for unit, *_ in found] == units
    for unit, x, y, width, height in found:
        assert math.isclose(width * height, unit.nbytes / sum(sizes), rel_tol=1e-6)
        assert -1e-9 <= x <= x + width <= 1 + 1e-9 and -1e-9 <= y <= y + height <= 1 + 1e-9


def test_waits_are_summed_by_what_is_waited_for() -> None:
    timeline = Timeline()
    first = timeline.run("gather", 2.0, name="a", kind="all_gather")
    second = timeline.run("gather", 3.0, name="b", kind="all_gather")
    third = timeline.run("gather", 1.0, name="a", kind="all_gather")
    timeline.run("compute", 1.0, [first])  # from 2 to 3
    timeline.run("compute", 0.5, [second])  # from 5
    timeline.run("compute", 0.5, [third])  # from 6
    waits = waits_in(timeline)
    assert [(wait.start, wait.end, wait.name) for wait in waits] == [(0.0, 2.0, "a"), (3.0, 5.0, "b"), (5.5, 6.0, "a")]
    rows = re.findall("<td>(.*?)</td><td>(.*?)</td><td>for the gather of (.*?)</td>", waits_table(waits, 6.5))
    assert rows == [("2500.00", "38.5%", "a"), ("2000.00", "30.8%", "b")]
    pytest.importorskip("matplotlib")
    picture = streams_plot(timeline, Plan((), 1), waits)
    assert ">waits<" in picture and picture.count("fill: #ff3b30") == 3 + 1  # and in the legend
    assert ">waits<" not in streams_plot(timeline, Plan((), 1), ())


def test_a_host_that_is_too_slow_is_waited_for() -> None:
    timeline = Timeline(host_seconds=1.0)
    for _ in range(3):
        timeline.run("compute", 0.25)
    waits = waits_in(timeline)
    assert [(wait.start, wait.end, wait.kind) for wait in waits] == [
        (0.0, 1.0, "host"),
        (1.25, 2.0, "host"),
        (2.25, 3.0, "host"),
    ]


def test_no_peak_is_left_out_of_the_plot() -> None:
    events: list[Any] = []
    for number in range(10_000):
        events += [Allocation(number, 7 + 1000 * (number == 7777), "cpu", "activation"), Free(number)]
    times, levels = highest_moments(StepTrace("cpu", tuple(events)), [0.001 * i for i in range(len(events))])
    assert len(times) == len(levels) <= 401
    assert times == sorted(times)
    assert max(level["activation"] for level in levels) == 1007
