"""Sharded tensors whose memory is being written: nobody reads it before the write has ended.

While a copy is on its way, or the host thread steps on parameters, the sharded tensors over that memory *have* no shard: it is
taken away from them, and the first who asks for it waits. So whoever reads one, by whatever way (an operation, a checkpoint,
``to_local()``), finds what is there after the work, never before or in between. So do other sharded tensors over the same
memory (``p.detach()``, ``p.data``, what ``model.state_dict()`` returns). A plain tensor can't wait: as long as the user has one
over the memory, or a view of it, whoever begins work on the memory returns when the work has ended.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol

import torch

from .exported_tensors import ExportedTensor
from .host_thread import Later

if TYPE_CHECKING:
    from .host import Host

__all__ = ["Copying", "PendingWrites", "Work", "flat_of", "pending_writes_of", "shard_of"]


class Work(Protocol):
    """Something that is done to memory."""

    @property
    def writes(self) -> bool:
        """True if it does more than to read."""

    def has_ended(self) -> bool:
        """Return True if :meth:`wait` would return at once, without an error."""

    def wait(self) -> None:
        """Return when it has ended; raise what it has raised."""

    def finish(self) -> None:
        """Do what :meth:`wait` does, on the host thread, in a task that was given behind this work."""


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


class PendingWrites:
    """What is done to one flat buffer's memory in the background, and the tensors that wait for it."""

    def __init__(self, host: Host) -> None:
        """`host`: whose memory it is, and whose waits are added up."""
        self._host = host
        self._works: list[Work] = []
        # By id; each has put its shard aside, with what that is a part of. Weak: a tensor refers to this, and autograd to
        # gradients, so that the garbage collector could not free them.
        self._taken: dict[int, weakref.ref[Any]] = {}
        self._aliases: dict[int, weakref.ref[Any]] = {}  # by id: the user's sharded tensors over the memory
        self._exported: list[ExportedTensor] = []  # plain tensors over the memory that the user may still have
        self.ended = 0  # how many of those are gone
        # Whoever waits does so for all; backward and an asynchronous save have threads of their own.
        self._lock = threading.RLock()

    def __bool__(self) -> bool:
        return bool(self._works)

    def begin(self, work: Work, tensors: Iterable[Any] = ()) -> None:
        """Note a `work` on the memory, in which the sharded tensors `tensors` lie. Works end in the order in which they began."""
        with self._lock:
            self.hurry()
            self._works.append(work)
            self.hold(tensors)
            self.hold([alias for alias in (ref() for ref in list(self._aliases.values())) if alias is not None])
        if self.exposed:
            self.settle()

    def hurry(self) -> None:
        """Start the works that wait to be asked for, before the host thread is given what must come behind them."""
        with self._lock:
            for work in self._works:
                if isinstance(work, Later):
                    work.begin()

    @property
    def works(self) -> tuple[Work, ...]:
        """The works that were begun and may not have ended."""
        with self._lock:
            return tuple(self._works)

    # -- for plain tensors ----------------------------------------------------------------------------------------
    def export(self, tensor: Any) -> torch.Tensor:
        """Return the shard of a sharded tensor as a plain tensor for the user, who may edit it unseen as long as he has it."""
        with self._lock:
            local: torch.Tensor = tensor._local  # waits
            if not local.numel():
                return local
            _ = self.exposed  # else those that are gone would add up where nothing is ever stepped on
            given, result = ExportedTensor.of(local, tensor._shard_state.flat)
            self._exported.append(given)
            return result

    @property
    def exposed(self) -> bool:
        """True if the user has a plain tensor over the memory.

        When one is found to be gone, :attr:`ended` grows: what was noted of the memory before may have been edited unseen."""
        if not self._exported:
            return False
        with self._lock:
            for tensor in [one for one in self._exported if not one.is_held()]:
                tensor.forget()
                self._exported.remove(tensor)
                self.ended += 1
            return bool(self._exported)

    # -- for sharded tensors --------------------------------------------------------------------------------------
    def follow(self, alias: Any) -> None:
        """Note one more sharded tensor over the memory, by weak reference."""
        number, own = id(alias), weakref.ref(self)

        def gone(ref: Any) -> None:
            moving = own()
            if moving is not None and moving._aliases.get(number) is ref:
                del moving._aliases[number]

        self._aliases[number] = weakref.ref(alias, gone)
        alias._shard_state.home = self

    def hold(self, tensors: Iterable[Any]) -> None:
        """Have whoever reads one of `tensors`, which lie in the memory, wait for the works that there are."""
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
        """Wait for all works, unless they only read."""
        if any(work.writes for work in list(self._works)):
            self.settle()

    def tidy(self) -> None:
        """Give the tensors their shards back, if all works have ended."""
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
        """Return the shard of a tensor that may have been taken away, and what it is a part of."""
        with self._lock:
            state = tensor._shard_state
            found: tuple[Any, Any] = (state.local, state.flat) if state.aside is None else state.aside
            return found


def flat_of(tensor: Any) -> Any:
    """Return the flat tensor, if any, that the shard of a sharded tensor is a part of. Wait for nothing."""
    if tensor is None:
        return None
    state = tensor._shard_state
    return state.flat if state.moving is None else state.moving.aside(tensor)[1]


def shard_of(tensor: Any) -> Any:
    """Return the shard of a sharded tensor. Wait for nothing that is written to it."""
    state = tensor._shard_state
    return state.local if state.moving is None else state.moving.aside(tensor)[0]


def pending_writes_of(tensor: Any) -> PendingWrites | None:
    """Return what is done in the background to the memory of a sharded tensor, if it is host memory."""
    state = tensor._shard_state
    found: PendingWrites | None = state.moving
    if found is None:
        found = state.home
    if found is None:
        found = getattr(state.flat, "_home", None)  # a gradient's or state's
    if found is None and state.unit_ref is not None:
        unit = state.unit_ref()
        host = None if unit is None or unit.host is None else unit.find(tensor)[0].host
        found = None if host is None else host.moving
    return found
