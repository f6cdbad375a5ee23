"""Backwards that run through several engines: their collectives share process groups, so their order must be one.

Each engine orders its own collectives. When one loss goes through two engines, their orders are mixed by the order of
the graph, which may differ between ranks where a part of a model is in the loss of some ranks only. Then a gradient
of one engine could meet a gradient of the other. What was issued is counted per process group, and compared at the end.
"""

from __future__ import annotations

import weakref
from typing import Any

_MASK = (1 << 61) - 1


class Together:
    """The backwards that run at present over one set of process groups."""

    def __init__(self) -> None:
        self._running: weakref.WeakSet[Any] = weakref.WeakSet()
        self._several = False
        self._issued: dict[str, int] = {}
        self._engines = 0

    def number(self) -> int:
        """A number for an engine, given at its first forward: the same on all ranks."""
        self._engines += 1
        return self._engines

    def begin(self, runtime: Any) -> None:
        if not self._running:
            self._several, self._issued = False, {}
        self._running.add(runtime)
        self._several |= len(self._running) > 1

    def note(self, kind: str, engine: int, unit: int) -> None:
        """A collective of `kind` (gather, reduce), which has a process group of its own, is issued."""
        if self._running:
            self._issued[kind] = (self._issued.get(kind, 0) * 1_000_003 + engine * 8191 + unit + 1) & _MASK

    def end(self, runtime: Any) -> int | None:
        """What has been issued, once the last of several backwards ends; None where there is nothing to compare."""
        self._running.discard(runtime)
        if self._running or not self._several:
            return None
        self._several = False
        return sum(value * (i + 1) for i, (_, value) in enumerate(sorted(self._issued.items()))) & _MASK


_together: weakref.WeakKeyDictionary[Any, Together] = weakref.WeakKeyDictionary()


def over(groups: Any) -> Together:
    """The one of `groups`."""
    found = _together.get(groups)
    if found is None:
        found = _together[groups] = Together()
    return found
