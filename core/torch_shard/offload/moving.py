"""Sharded tensors whose memory is being written: nobody reads it before that has ended.

While a copy is on its way, or the host thread steps on parameters, the sharded tensors over that memory *have* no slice: it is
taken away from them, and the first who asks for it waits. So whoever reads one, by whatever way (an operation, a checkpoint,
``to_local()``), finds what is there after the work, never before or in between.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from typing import Any, Protocol

__all__ = ["Moving", "Waits", "Work", "whole_of"]


class Work(Protocol):
    """Something that writes to memory."""

    def wait(self) -> None:
        """Return when it has ended; raise what it has raised."""


class Waits:
    """How long was waited for an engine's works, in all."""

    def __init__(self) -> None:
        self.seconds = 0.0


class Moving:
    """What is done to one flat buffer's memory in the background, and the tensors that wait for it."""

    def __init__(self, waits: Waits | None = None) -> None:
        """`waits`: where the time that is waited is added."""
        self._waits = waits or Waits()
        self._works: list[Work] = []
        self._taken: dict[int, tuple[Any, Any, Any]] = {}  # by id: tensor, its slice, and what that is a part of
        # Whoever waits does so for all; backward and an asynchronous save have threads of their own.
        self._lock = threading.RLock()

    def __bool__(self) -> bool:
        return bool(self._works)

    def begin(self, work: Work, tensors: Iterable[Any] = ()) -> None:
        """`work` writes to the memory, in which `tensors` lie, sharded tensors. Works end in the order in which they began."""
        with self._lock:
            self._works.append(work)
            self.hold(tensors)

    def hold(self, tensors: Iterable[Any]) -> None:
        """These lie in the memory, too: whoever reads one waits for the works that there are."""
        with self._lock:
            for tensor in tensors if self._works else ():
                own = tensor.__dict__
                if "_local" in own:
                    self._taken[id(tensor)] = tensor, own.pop("_local"), own.pop("_flat", None)
                    own["_moving"] = self

    def settle(self) -> None:
        """Wait for all works.

        Raises:
            Exception: what a work has raised, once; its memory is then as the work has left it.
        """
        if not self._works:
            return
        begun = time.perf_counter()
        try:
            self._settle()
        finally:
            self._waits.seconds += time.perf_counter() - begun

    def _settle(self) -> None:
        with self._lock:
            while self._works:
                try:
                    self._works[0].wait()
                except Exception:
                    self._works.clear()  # those that come after one that has failed have not run
                    self._give_back()
                    raise
                del self._works[0]
            self._give_back()

    def _give_back(self) -> None:
        taken, self._taken = self._taken, {}
        for tensor, local, flat in taken.values():
            own = tensor.__dict__
            own.pop("_moving", None)
            if "_local" not in own:
                own["_local"] = local
                if flat is not None:
                    own["_flat"] = flat

    def whole_of(self, tensor: Any) -> Any:
        with self._lock:
            held = self._taken.get(id(tensor))
            return tensor.__dict__.get("_flat") if held is None else held[2]


def whole_of(tensor: Any) -> Any:
    """What the slice of a sharded tensor is a part of: the tensor itself, without waiting for what is written to it. None where
    it is a part of nothing."""
    if tensor is None:
        return None
    own = tensor.__dict__
    moving: Moving | None = own.get("_moving")
    return own.get("_flat") if moving is None else moving.whole_of(tensor)
