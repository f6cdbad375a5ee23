"""Checks that several engines over one set of process groups issue their collectives in one order on all ranks.

Each engine orders its own collectives, but all engines share the groups, and a collective of one engine must not pair with one
of another. Each engine therefore has a name, which is part of every sequence that the ranks compare, and control messages of
all engines have one size.

When one loss goes through two engines, the order of the autograd graph interleaves their reductions. This order may differ
between ranks if a part of a model is in the loss of some ranks only. The collectives are therefore recorded for each process
group, and the ranks compare the records at the end of the backward. Until then no engine waits for its reductions: if the
order differs, a rank may wait in one engine for a collective that another rank issues only after the end of the next engine.
"""

from __future__ import annotations

import weakref
from collections import Counter
from typing import Any

_MASK = (1 << 61) - 1


class EngineOrder:
    """The engines over one set of process groups, with the backwards that are running in them."""

    def __init__(self) -> None:
        self._running: dict[int, int] = {}  # by the id of a runtime, the graph task with which its backward ends
        # By graph task: the runtimes that have ended and wait for the task's other runtimes.
        self._ended: dict[int, list[Any]] = {}
        self._several = False  # True once several backwards run at one time
        self._issued: dict[str, int] = {}  # by kind of collective, a running hash of those issued in these backwards
        self._engines = 0  # the number of engines that were given a name
        self._copies: Counter[tuple[str, str]] = Counter()
        self._engines_here: weakref.WeakSet[Any] = weakref.WeakSet()  # the runtimes of the engines
        self.width = 0  # bytes of the largest engine's message at the end of a backward

    def widen(self, width: int) -> None:
        """Make room for an engine whose messages have `width` bytes."""
        self.width = max(self.width, width)

    def name(self) -> str:
        """Return a name for a new engine. It is equal on all ranks, because shard() is collective."""
        self._engines += 1
        return f"model {self._engines}"

    def name_of_copy(self, original: str, line: str) -> str:
        """Return a name for a deep copy made at this line of code, which is equal on all ranks that make it there, too.

        Copying is not collective: one rank alone may make a copy, so the copies are not counted as the engines are.
        """
        line = line.rpartition("/")[2]  # folders may differ between hosts
        self._copies[original, line] += 1
        return f"a copy of {original}, made at {line} ({self._copies[original, line]})"

    def join(self, runtime: Any) -> None:
        """Add an engine, by its runtime."""
        self._engines_here.add(runtime)

    @property
    def has_one(self) -> bool:
        """True if one engine alone uses these process groups."""
        return len(self._engines_here) == 1

    @property
    def engines(self) -> list[Any]:
        """The runtimes of all engines over these process groups that are still in use."""
        return list(self._engines_here)

    def begin(self, runtime: Any, task: int) -> None:
        """Note that a backward through an engine begins, which ends with the graph task `task`."""
        if not self._running:
            self._several, self._issued = False, {}
        self._running[id(runtime)] = task
        self._several |= len(self._running) > 1

    def note(self, kind: str, engine: int, unit: int) -> None:
        """Note that a collective of `kind` (gather, reduce) is issued; each kind has its own process group."""
        if self._running:
            self._issued[kind] = (self._issued.get(kind, 0) * 1_000_003 + engine * 8191 + unit + 1) & _MASK

    def end(self, runtime: Any) -> list[Any]:
        """Note that an engine has issued all its reductions, and return the runtimes that may now wait for theirs.

        The list is empty while other engines are still to end with the same graph task. The last of them gets all, in the
        order in which they ended. (A backward inside another one ends before it.)
        """
        task = self._running.pop(id(runtime))
        ended = self._ended.setdefault(task, [])
        ended.append(runtime)
        if task in self._running.values():
            return []
        return self._ended.pop(task)

    def order(self) -> int | None:
        """Return a hash of the issued collectives once the last of several backwards has ended; None if nothing is to compare."""
        if self._running or not self._several:
            return None
        self._several = False
        return sum(value * (i + 1) for i, (_, value) in enumerate(sorted(self._issued.items()))) & _MASK

    def abandon(self, runtime: Any) -> None:
        """Forget an engine whose backward has failed, or whose backward ended before that of another engine failed."""
        self._running.pop(id(runtime), None)
        left = {task: [other for other in ended if other is not runtime] for task, ended in self._ended.items()}
        self._ended = {task: ended for task, ended in left.items() if ended}
