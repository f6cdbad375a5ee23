"""What the units of this process do while a test runs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from torch_shard.runtime.reduce_schedule import ReduceSchedule
from torch_shard.unit.unit import Unit

__all__ = ["followed"]


@contextmanager
def followed(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, str]]]:
    """Yield a list that gets "gather", "free" or "reduce" and the name of the unit, each time that a unit does that."""
    found: list[tuple[str, str]] = []
    unshard, reshard, issue = Unit.unshard, Unit.reshard, ReduceSchedule._issue

    def unshards(unit: Unit, from_secondary: bool = False) -> None:
        before = unit.state
        unshard(unit, from_secondary)
        if unit.state is not before:
            found.append(("gather", unit.name))

    def reshards(unit: Unit, for_backward: bool = False) -> None:
        before = unit.state
        reshard(unit, for_backward)
        if unit.state is not before:
            found.append(("free", unit.name))

    def issues(schedule: ReduceSchedule, unit: Unit, early: bool = False) -> None:
        found.append(("reduce", unit.name))
        issue(schedule, unit, early)

    with monkeypatch.context() as patch:
        patch.setattr(Unit, "unshard", unshards)
        patch.setattr(Unit, "reshard", reshards)
        patch.setattr(ReduceSchedule, "_issue", issues)
        yield found
