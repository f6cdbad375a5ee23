"""Sharded tensors whose memory is being written: nobody reads it before that has ended.

While a copy is on its way, or the host thread steps on parameters, the sharded tensors over that memory *have* no slice: it is
taken away from them, and the first who asks for it waits. So whoever reads one, by whatever way (an operation, a checkpoint,
``to_local()``), finds what is there after the work, never before or in between. So do other sharded tensors over the same
memory (``p.detach()``, ``p.data``, what ``model.state_dict()`` returns). Plain tensors can't wait: once the user was given one
over the memory, work on it has ended before whoever begins it returns.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterable
from typing import Any, Protocol

__all__ = ["Moving", "Waits", "Work", "home_of", "whole_of"]


class Work(Protocol):
    """Something that is done to memory."""

    @property
    def writes(self) -> bool:
        """Whether it does more than to read."""

    def has_ended(self) -> bool:
        """Whether :meth:`wait` would return at once, without an error."""

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
        # By id; each has put its slice aside, with what that is a part of. Weak: a tensor refers to this, and autograd to
        # gradients, so that the garbage collector could not free them.
        self._taken: dict[int, weakref.ref[Any]] = {}
        self._aliases: dict[int, weakref.ref[Any]] = {}  # by id: the user's sharded tensors over the memory
        self.exposed = False  # the user was given the memory itself
        # Whoever waits does so for all; backward and an asynchronous save have threads of their own.
        self._lock = threading.RLock()

    def __bool__(self) -> bool:
        return bool(self._works)

    def begin(self, work: Work, tensors: Iterable[Any] = ()) -> None:
        """`work` writes to the memory, in which `tensors` lie, sharded tensors. Works end in the order in which they began."""
        with self._lock:
            self._works.append(work)
            self.hold(tensors)
            self.hold([alias for alias in (ref() for ref in list(self._aliases.values())) if alias is not None])
        if self.exposed:
            self.settle()

    def follow(self, alias: Any) -> None:
        """One more sharded tensor lies in the memory; kept by weak reference."""
        number, own = id(alias), weakref.ref(self)

        def gone(ref: Any) -> None:
            moving = own()
            if moving is not None and moving._aliases.get(number) is ref:
                del moving._aliases[number]

        self._aliases[number] = weakref.ref(alias, gone)
        alias.__dict__["_home"] = self

    def hold(self, tensors: Iterable[Any]) -> None:
        """These lie in the memory, too: whoever reads one waits for the works that there are."""
        with self._lock:
            for tensor in tensors if self._works else ():
                own = tensor.__dict__
                if "_local" in own:
                    self._taken[id(tensor)] = weakref.ref(tensor)
                    own["_aside"] = own["_local"], own.get("_flat")
                    # In this order: another thread finds the one or the other.
                    own["_moving"] = self
                    del own["_local"]
                    own.pop("_flat", None)

    def settle(self) -> None:
        """Wait for all works.

        Raises:
            Exception: what the first that has failed has raised, once; all have ended, and the memory is as they have left it.
        """
        if not self._works and not self._taken:
            return
        begun = time.perf_counter()
        try:
            self._settle()
        finally:
            self._waits.seconds += time.perf_counter() - begun

    def _settle(self) -> None:
        error: Exception | None = None
        with self._lock:
            while self._works:
                try:
                    self._works[0].wait()
                except Exception as failure:
                    error = error or failure
                del self._works[0]
            self._give_back()
        if error is not None:
            raise error

    def settle_writes(self) -> None:
        """The same, unless all that is done is to read."""
        if any(work.writes for work in list(self._works)):
            self.settle()

    def tidy(self) -> None:
        """Let go of the tensors, if everything has ended."""
        with self._lock:
            if self._taken and all(work.has_ended() for work in self._works):
                self.settle()

    def _give_back(self) -> None:
        for tensor in (ref() for ref in self._taken.values()):
            own = {} if tensor is None else tensor.__dict__
            local, flat = own.get("_aside", (None, None))
            if local is not None and "_local" not in own:
                if flat is not None:
                    own["_flat"] = flat
                own["_local"] = local
            own.pop("_moving", None)
            own.pop("_aside", None)
        self._taken = {}

    def whole_of(self, tensor: Any) -> Any:
        with self._lock:
            own = tensor.__dict__
            return own["_aside"][1] if "_aside" in own else own.get("_flat")


def whole_of(tensor: Any) -> Any:
    """What the slice of a sharded tensor is a part of: the tensor itself, without waiting for what is written to it. None where
    it is a part of nothing."""
    if tensor is None:
        return None
    own = tensor.__dict__
    moving: Moving | None = own.get("_moving")
    return own.get("_flat") if moving is None else moving.whole_of(tensor)


def home_of(tensor: Any) -> Moving | None:
    """What is done to the memory of a sharded tensor, where that is host memory that is worked on in the background."""
    own = tensor.__dict__
    found: Moving | None = own.get("_moving")
    if found is None:
        found = own.get("_home")
    if found is None:
        found = getattr(own.get("_flat"), "_home", None)  # a gradient's or state's
    if found is None and own.get("_unit_ref") is not None:
        unit = own["_unit_ref"]()
        host = None if unit is None or unit.host is None else unit.find(tensor)[0].host
        found = None if host is None else host.moving
    return found
