"""Work on host memory in the background, and the sharded tensors that wait for it.

While a copy is on its way, or the host thread steps on parameters, the sharded tensors over that memory *have* no shard: it is
taken away from them, and the first reader waits. So every way to read one (an operation, a checkpoint, ``to_local()``) finds
what is there after the work, never before or in between. The same holds for other sharded tensors over the memory
(``p.detach()``, ``p.data``, what ``model.state_dict()`` returns). A plain tensor can't wait: as long as the user has one over the
memory, or a view of it, the call that begins work on the memory returns when the work has ended.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from .exported_tensors import ExportedTensor
from .host_thread import Later, Task

if TYPE_CHECKING:
    from .host import Host


@dataclass(frozen=True, eq=False)
class Copying:
    """A copy between host memory and a GPU, until a CUDA event. Its interface is that of a :class:`~.host_thread.Task`.

    Attributes:
        event: the event recorded after the copy.
        writes: True if the copy goes to host memory.
    """

    event: Any
    writes: bool

    def has_ended(self) -> bool:
        return bool(self.event.query())

    def wait(self) -> None:
        self.event.synchronize()

    finish = wait


Work: TypeAlias = Copying | Task
"""Something that is done to host memory in the background."""


class PendingWrites:
    """The background work on one flat buffer's host memory, and the tensors that wait for it.

    Attributes:
        ended: the number of plain tensors over the memory that were handed out and are gone by now.
    """

    def __init__(self, host: Host) -> None:
        """Note no work yet. `host` has the memory, and adds up the time waited."""
        self._host = host
        self._works: list[Work] = []
        # By id: the tensors whose shards were taken away. The references are weak because a tensor refers to this object, and
        # autograd to gradients, so that the garbage collector could not free them.
        self._taken: dict[int, weakref.ref[Any]] = {}
        # By id: the user's sharded tensors over the memory.
        self._aliases: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
        self._exported: list[ExportedTensor] = []  # plain tensors over the memory that the user may still have
        self.ended = 0
        # One thread waits on behalf of all; backward and an asynchronous save have threads of their own.
        self._lock = threading.RLock()

    def __bool__(self) -> bool:
        return bool(self._works)

    def begin(self, work: Work, tensors: Iterable[Any] = ()) -> None:
        """Note `work` on the memory in which the sharded tensors `tensors` lie. Works end in the order in which they began."""
        with self._lock:
            self.start_deferred()
            self._works.append(work)
            self.block_reads(tensors)
            # A copy of the list, because other threads may make aliases meanwhile.
            self.block_reads([alias for ref in self._aliases.valuerefs() if (alias := ref()) is not None])
        if self.exposed:
            self.wait()

    def start_deferred(self) -> None:
        """Start the works that wait to be asked for, before the host thread is given what must come after them."""
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
        """Return the shard of a sharded tensor as a plain tensor, which the user may edit unseen as long as it exists."""
        with self._lock:
            local: torch.Tensor = tensor._local  # waits
            if not local.numel():
                return local
            self._forget_gone()  # they would add up where nothing is ever stepped on
            given, result = ExportedTensor.of(local, tensor._shard_state.flat)
            self._exported.append(given)
            return result

    @property
    def exposed(self) -> bool:
        """True if the user has a plain tensor over the memory.

        When one is found to be gone, :attr:`ended` grows: the memory may have been edited unseen since it was last looked at.
        """
        if not self._exported:
            return False
        with self._lock:
            self._forget_gone()
            return bool(self._exported)

    def _forget_gone(self) -> None:
        """Forget the plain tensors that the user has dropped. Call this with the lock."""
        for tensor in [one for one in self._exported if not one.is_held()]:
            tensor.forget()
            self._exported.remove(tensor)
            self.ended += 1

    # -- for sharded tensors --------------------------------------------------------------------------------------
    def add_alias(self, alias: Any) -> None:
        """Make one more sharded tensor over the memory, which the user has made, wait for works from now on."""
        self._aliases[id(alias)] = alias
        alias._shard_state.pending_writes = self

    def block_reads(self, tensors: Iterable[Any]) -> None:
        """Take the shards of `tensors`, which lie in the memory, away until the works have ended, so that reads wait."""
        with self._lock:
            for tensor in tensors if self._works else ():
                if tensor._shard_state.is_here:
                    self._taken[id(tensor)] = weakref.ref(tensor)
                    tensor._shard_state.take_away(self)

    def wait(self) -> None:
        """Wait for all works, and give the tensors their shards back.

        Raises:
            Exception: what the first work that failed has raised. All works have ended, and the next call raises nothing.
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

    def wait_for_writes(self) -> None:
        """Wait for all works if one of them writes."""
        if any(work.writes for work in list(self._works)):
            self.wait()

    def restore_if_done(self) -> None:
        """Give the tensors their shards back if all works have ended."""
        with self._lock:
            if self._taken and all(work.has_ended() for work in self._works):
                self.wait()

    def _give_back(self) -> None:
        for tensor in (ref() for ref in self._taken.values()):
            state = getattr(tensor, "_shard_state", None)
            if state is not None:
                state.give_back()
        self._taken = {}

    def shard_and_flat(self, tensor: Any) -> tuple[Any, Any]:
        """Return the shard of a tensor, taken away or not, and the flat tensor that it is a part of. Wait for nothing."""
        with self._lock:
            state = tensor._shard_state
            found: tuple[Any, Any] = (state.local, state.flat) if state.aside is None else state.aside
            return found
