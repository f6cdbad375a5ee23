"""Sharded tensors whose memory is being written: nobody reads it before that has ended.

While a copy is on its way, or the host thread steps on parameters, the sharded tensors over that memory *have* no slice: it is
taken away from them, and the first who asks for it waits. So whoever reads one, by whatever way (an operation, a checkpoint,
``to_local()``), finds what is there after the work, never before or in between. So do other sharded tensors over the same
memory (``p.detach()``, ``p.data``, what ``model.state_dict()`` returns). Plain tensors can't wait: as long as the user has one
over the memory, or a view of it, work on it has ended before whoever begins it returns.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

import torch

from .exported_tensors import HandedOut
from .host_thread import Later

if TYPE_CHECKING:
    from .host import Host

__all__ = ["Copying", "Moving", "Work", "home_of", "slice_of", "whole_of"]


class Work(Protocol):
    """Something that is done to memory."""

    @property
    def writes(self) -> bool:
        """Whether it does more than to read."""

    def has_ended(self) -> bool:
        """Whether :meth:`wait` would return at once, without an error."""

    def wait(self) -> None:
        """Return when it has ended; raise what it has raised."""

    def finish(self) -> None:
        """The same on the host thread, in a task that was given behind it."""


class Copying:
    """A copy between host memory and a GPU, until a CUDA event. `writes`: to host memory."""

    def __init__(self, event: Any, writes: bool) -> None:
        self._event, self._writes = event, writes

    @property
    def writes(self) -> bool:
        return self._writes

    def has_ended(self) -> bool:
        ended: bool = self._event.query()
        return ended

    def wait(self) -> None:
        self._event.synchronize()

    finish = wait


class Moving:
    """What is done to one flat buffer's memory in the background, and the tensors that wait for it."""

    def __init__(self, host: Host) -> None:
        """`host`: whose memory it is, and whose waits are added up."""
        self._host = host
        self._works: list[Work] = []
        # By id; each has put its slice aside, with what that is a part of. Weak: a tensor refers to this, and autograd to
        # gradients, so that the garbage collector could not free them.
        self._taken: dict[int, weakref.ref[Any]] = {}
        self._aliases: dict[int, weakref.ref[Any]] = {}  # by id: the user's sharded tensors over the memory
        self._given: list[HandedOut] = []  # plain tensors over the memory that the user may still have
        self.ended = 0  # how many of those are gone
        # Whoever waits does so for all; backward and an asynchronous save have threads of their own.
        self._lock = threading.RLock()

    def __bool__(self) -> bool:
        return bool(self._works)

    def begin(self, work: Work, tensors: Iterable[Any] = ()) -> None:
        """`work` writes to the memory, in which `tensors` lie, sharded tensors. Works end in the order in which they began."""
        with self._lock:
            self.hurry()
            self._works.append(work)
            self.hold(tensors)
            self.hold([alias for alias in (ref() for ref in list(self._aliases.values())) if alias is not None])
        if self.exposed:
            self.settle()

    def hurry(self) -> None:
        """Have what waits to be asked for done now: before the host thread is given what must come behind it."""
        with self._lock:
            for work in self._works:
                if isinstance(work, Later):
                    work.begin()

    @property
    def works(self) -> tuple[Work, ...]:
        """What was begun and perhaps not ended."""
        with self._lock:
            return tuple(self._works)

    # -- for plain tensors ----------------------------------------------------------------------------------------
    def hand_out(self, tensor: Any) -> torch.Tensor:
        """The slice of a sharded tensor in the memory, for the user, who may edit it unseen as long as he has it."""
        with self._lock:
            local: torch.Tensor = tensor._local  # waits
            if not local.numel():
                return local
            _ = self.exposed  # else those that are gone would add up where nothing is ever stepped on
            given, result = HandedOut.of(local, tensor._shard_state.flat)
            self._given.append(given)
            return result

    @property
    def exposed(self) -> bool:
        """Whether the user has a plain tensor over the memory. Where it tells that there is one no more, :attr:`ended` has
        grown: what was noted of the memory before then may have been edited unseen."""
        if not self._given:
            return False
        with self._lock:
            for given in [one for one in self._given if not one.is_held()]:
                given.forget()
                self._given.remove(given)
                self.ended += 1
            return bool(self._given)

    # -- for sharded tensors --------------------------------------------------------------------------------------
    def follow(self, alias: Any) -> None:
        """One more sharded tensor lies in the memory; kept by weak reference."""
        number, own = id(alias), weakref.ref(self)

        def gone(ref: Any) -> None:
            moving = own()
            if moving is not None and moving._aliases.get(number) is ref:
                del moving._aliases[number]

        self._aliases[number] = weakref.ref(alias, gone)
        alias._shard_state.home = self

    def hold(self, tensors: Iterable[Any]) -> None:
        """These lie in the memory, too: whoever reads one waits for the works that there are."""
        with self._lock:
            for tensor in tensors if self._works else ():
                if tensor._shard_state.is_here:
                    self._taken[id(tensor)] = weakref.ref(tensor)
                    tensor._shard_state.take_away(self)

    def settle(self) -> None:
        """Wait for all works.

        Raises:
            Exception: what the first that has failed has raised, once; all have ended, and the memory is as they have left it.
        """
        if not self._works and not self._taken:
            return
        error: Exception | None = None
        begun = time.perf_counter()
        with self._lock:
            while self._works:
                try:
                    self._works[0].wait()
                except Exception as failure:
                    error = error or failure
                del self._works[0]
            self._give_back()
        self._host.waited += time.perf_counter() - begun
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
            state = getattr(tensor, "_shard_state", None)
            if state is not None:
                state.give_back()
        self._taken = {}

    def aside(self, tensor: Any) -> tuple[Any, Any]:
        """Its slice, and what that is a part of."""
        with self._lock:
            state = tensor._shard_state
            found: tuple[Any, Any] = (state.local, state.flat) if state.aside is None else state.aside
            return found


def whole_of(tensor: Any) -> Any:
    """What the slice of a sharded tensor is a part of: the tensor itself, without waiting for what is written to it. None where
    it is a part of nothing."""
    if tensor is None:
        return None
    state = tensor._shard_state
    return state.flat if state.moving is None else state.moving.aside(tensor)[1]


def slice_of(tensor: Any) -> Any:
    """The slice of a sharded tensor, without waiting for what is written to it."""
    state = tensor._shard_state
    return state.local if state.moving is None else state.moving.aside(tensor)[0]


def home_of(tensor: Any) -> Moving | None:
    """What is done to the memory of a sharded tensor, where that is host memory that is worked on in the background."""
    state = tensor._shard_state
    found: Moving | None = state.moving
    if found is None:
        found = state.home
    if found is None:
        found = getattr(state.flat, "_home", None)  # a gradient's or state's
    if found is None and state.unit_ref is not None:
        unit = state.unit_ref()
        host = None if unit is None or unit.host is None else unit.find(tensor)[0].host
        found = None if host is None else host.moving
    return found
