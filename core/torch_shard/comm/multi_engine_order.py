"""Several engines over one set of process groups: their operations must come in one order on all ranks.

Each engine orders its own collectives, but all of them share the groups. So that no collective of one engine pairs with
one of another, each has a number, which is part of every sequence that the ranks compare, and control messages are of one
size. When one loss goes through two engines, their reductions are mixed by the order of the graph, which may differ
between ranks where a part of a model is in the loss of some ranks only: what was issued is counted per process group, and
compared at the end. Until then no engine waits for its reductions: where the order differs, what one rank waits for in one
engine may be what another rank sends behind the end of the next one.
"""

from __future__ import annotations

import weakref
from typing import Any

_MASK = (1 << 61) - 1


class Together:
    """The engines over one set of process groups, and those of their backwards that run at present."""

    def __init__(self) -> None:
        self._running: dict[int, int] = {}  # by ids of the runtimes, the graph task that each one ends with
        self._ended: dict[int, list[Any]] = {}  # by graph task, the runtimes that wait for others with the same
        self._several = False
        self._issued: dict[str, int] = {}
        self._engines = 0
        self._copies: dict[int, int] = {}
        self._engines_here: weakref.WeakSet[Any] = weakref.WeakSet()  # their runtimes
        self.width = 0  # bytes of the largest engine's message at the end of a backward

    def widen(self, width: int) -> None:
        """There is an engine with messages of `width` bytes."""
        self.width = max(self.width, width)

    def number(self) -> int:
        """A number for a new engine: the same on all ranks, since shard() is collective."""
        self._engines += 1
        return self._engines

    def number_of_copy(self, original: int) -> int:
        """A number for a deep copy of an engine. Copying is not collective, so it is given at the copy's first forward: two
        copies of one model that ranks take in different order are not told apart."""
        self._copies[original] = self._copies.get(original, 0) + 1
        return original + 1_000_003 * self._copies[original]

    def join(self, runtime: Any) -> None:
        """There is an engine."""
        self._engines_here.add(runtime)

    def drop_parts(self) -> None:
        """A backward has ended. What units of *all* engines keep for one is dropped: a model that is frozen, a teacher, may never
        get one of its own. (One that comes later gathers from all ranks.)"""
        for runtime in self._engines_here:
            for unit in runtime.units:
                unit.drop_secondary_shards()

    def begin(self, runtime: Any, task: int) -> None:
        """A backward through an engine begins, which ends with the graph task `task`."""
        if not self._running:
            self._several, self._issued = False, {}
        self._running[id(runtime)] = task
        self._several |= len(self._running) > 1

    def note(self, kind: str, engine: int, unit: int) -> None:
        """A collective of `kind` (gather, reduce), which has a process group of its own, is issued."""
        if self._running:
            self._issued[kind] = (self._issued.get(kind, 0) * 1_000_003 + engine * 8191 + unit + 1) & _MASK

    def end(self, runtime: Any) -> list[Any]:
        """An engine has sent everything: those that may now wait for it, in the order in which they ended. None, while others
        are to end with the same graph task; the last of these gets them all. (A backward inside another one ends before it.)"""
        task = self._running.pop(id(runtime))
        ended = self._ended.setdefault(task, [])
        ended.append(runtime)
        if task in self._running.values():
            return []
        return self._ended.pop(task)

    def order(self) -> int | None:
        """What has been issued, once the last of several backwards has ended; None where there is nothing to compare."""
        if self._running or not self._several:
            return None
        self._several = False
        return sum(value * (i + 1) for i, (_, value) in enumerate(sorted(self._issued.items()))) & _MASK

    def abandon(self, runtime: Any) -> None:
        """Its backward has failed, perhaps after its end, by another engine's."""
        self._running.pop(id(runtime), None)
        for task, ended in list(self._ended.items()):
            left = [other for other in ended if other is not runtime]
            if left:
                self._ended[task] = left
            else:
                del self._ended[task]


_together: weakref.WeakKeyDictionary[Any, Together] = weakref.WeakKeyDictionary()


def over(groups: Any) -> Together:
    """The one of `groups`."""
    found = _together.get(groups)
    if found is None:
        found = _together[groups] = Together()
    return found
