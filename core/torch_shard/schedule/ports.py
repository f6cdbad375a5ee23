"""The interfaces that the schedule of unshards needs of units and of the runtime, which are above it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from .unit_state import State


class ScheduledUse(Protocol):
    """A forward of a unit, which :class:`torch_shard.runtime.use.Use` describes."""

    unit: Any
    start: int
    end: int
    task: int


class ScheduledUnit(Protocol):
    """A unit, which :class:`torch_shard.unit.unit.Unit` describes attribute by attribute."""

    name: str
    index: int
    state: State
    running: int
    uses: list[Any]
    kept: list[Any]
    refill: bool
    awaits_trigger: bool
    outdated: bool
    exposed: bool
    event_texts: list[str]

    @property
    def params(self) -> Sequence[Any]:
        """The parameters, each with ``requires_grad``."""

    def is_stale(self) -> bool: ...

    def unshard(self, from_secondary: bool = False) -> None: ...

    def wait(self) -> None: ...

    def reshard(self, for_backward: bool = False) -> None: ...

    def note_resharded(self) -> None: ...

    def drop_secondary_shards(self) -> None: ...


UnitT = TypeVar("UnitT", bound=ScheduledUnit)
_UnitT = TypeVar("_UnitT", bound=ScheduledUnit, contravariant=True)


class LoneReadsPort(Protocol[_UnitT]):
    """The reads of the model by this rank alone."""

    @property
    def running(self) -> bool:
        """True while such a read is running."""

    def unshard(self, unit: _UnitT) -> None:
        """Gather `unit` for the running read."""


class OperationsPort(Protocol):
    """The operations of one engine, which its ranks compare."""

    on_difference: Callable[[], None]  # called when the ranks have differed in their operations

    def note(self, code: int, text: str) -> None:
        """Add an operation."""

    def check(self, what: str) -> object:
        """Compare the operations so far with the other ranks. Collective."""
