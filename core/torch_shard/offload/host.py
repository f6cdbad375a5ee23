"""The host memory of one engine, and the thread that works on it."""

from __future__ import annotations

import contextlib
import sys
import threading
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..comm.collectives import Collectives, outside_inference
from ..config.offload import IN_FLIGHT, Offload
from ..errors import HostStepError
from . import pinned
from .disk import DiskStore
from .host_thread import HostThread
from .staging import Staging

if TYPE_CHECKING:
    from ..layout.flat_layout import FlatLayout
    from ..plan.plan import ParamInfo


class Host:
    """The host memory, disk and thread that the units of an engine share.

    On a machine without a GPU the device is the CPU, and all that would cross is copied.

    Attributes:
        arrived: bytes of gradients that were copied from the device.
        norms: the orders of gradients' norms that were asked for so far. These norms are taken while gradients are copied.
        waited: seconds for which other threads have waited for background work on this memory.
        users: the runtimes of the engines that use it: a model's and those of its copies.
    """

    def __init__(self, offload: Offload, collectives: Collectives) -> None:
        """Allocate nothing yet; see :meth:`open`."""
        self.offload, self.collectives, self.device = offload, collectives, collectives.device
        self.streams = collectives.streams
        if collectives.gather_stream is None:  # one rank, which gathers all the same
            collectives.gather_stream = self.streams.new()
        self.thread = HostThread(self.device, self._failed)
        self._stream: Any = None
        self.staging = Staging(self)
        self._leaving: deque[_Leaving] = deque()
        self._leaving_lock = threading.Lock()  # the host thread frees what has arrived
        self._turn, self._unit, self._of_turn = 0, -1, set[int]()  # the latest: see `keep`
        self.arrived = 0
        self.norms: set[float] = set()
        self.disk: DiskStore | None = None
        self.waited = 0.0
        self.users: weakref.WeakSet[object] = weakref.WeakSet()

    def __deepcopy__(self, memo: dict[int, Any]) -> Host:
        return self  # memory, streams and the thread belong to the process, not to a model

    def _failed(self, error: BaseException) -> HostStepError:
        made = HostStepError(
            f"rank {self.collectives.world_rank}: {error} The work that failed ran in the background, after optimizer.step() had "
            "returned or during backward; parameters and optimizer state may be updated in part, so go on from a checkpoint."
        )
        made.__cause__ = error
        self.give_up(made)
        return made

    def give_up(self, error: Exception) -> None:
        """Tell the other ranks that this rank's step has failed. They may have stepped, and must not go on with this rank."""
        channel = self.collectives.reduce_channel
        if channel is not None:
            channel.groups.abort(self.collectives.world_rank, error)

    # -- memory ---------------------------------------------------------------------------------------------------
    def open(self) -> None:
        """Open the directory for what is to lie on disk. Not collective.

        Raises:
            DiskError, UnavailableError: the directory can't be used.
        """
        if self.offload.nvme is not None:
            self.disk = DiskStore(self.offload.nvme, rank=self.collectives.world_rank)

    def take_shards(
        self, groups: Sequence[Sequence[tuple[Sequence[ParamInfo], FlatLayout]]], names: Sequence[str]
    ) -> dict[int, torch.Tensor]:
        """Return memory for all shards, by id of their layouts; reserve what gradients arrive in. Not collective.

        Args:
            groups: the groups of parameters that are flattened together, with their layouts, by unit.
            names: the units' names.

        Raises:
            HostMemoryError, DiskError: there is no memory, or no space.
        """
        c, widest = self.collectives, 0
        for infos, layout in (group for unit in groups for group in unit):
            dtypes = infos[0].dtypes
            crossing = dtypes.crossing(c.data_parallel_size > 1)
            if infos[0].requires_grad and not c.sums_wide and crossing != dtypes.grad:
                widest = max(widest, layout.shard_numel * crossing.itemsize)
        self.staging.reserve(widest)
        return {
            id(layout): self.empty_shard(layout.shard_numel, infos[0].dtypes.stored, name)
            for name, unit in zip(names, groups, strict=True)
            for infos, layout in unit
        }

    def leave(self, user: object) -> None:
        """Note that one of the engines that use this memory is closed. The last one ends the threads; tensors stay readable."""
        self.users.discard(user)
        if not self.users:
            self.thread.close()
            if self.disk is not None:
                self.disk.close()

    def empty(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a 1-D tensor in host memory, page-locked where that is wanted and there is a GPU.

        Raises:
            HostMemoryError: the system does not give the memory.
        """
        with outside_inference():
            return pinned.allocate(numel, dtype, pin=self.offload.pin_memory, device=self.device)

    def empty_shard(self, numel: int, dtype: torch.dtype, name: str) -> torch.Tensor:
        """Return a 1-D tensor for parameters that the optimizer steps on, which may lie on disk. `name`: for messages."""
        if self.disk is not None and self.offload.nvme_params:
            return self.disk.allocate(f"parameters {name}", numel, dtype)
        return self.empty(numel, dtype)

    # -- from the device ------------------------------------------------------------------------------------------
    def leaving(self) -> contextlib.AbstractContextManager[Any]:
        """Enter the stream of copies to host memory, which then waits for what the current stream was given so far."""
        if self._stream is None:
            self._stream = self.streams.new()
        # Hazard: what is copied is still being computed on the current stream.
        return self.streams.follow(self._stream)

    def keep(self, event: Any, values: torch.Tensor, unit: int, flat: int, streams: Sequence[Any]) -> None:
        """Keep device memory that a copy reads until `event`.

        Hazard: the stream that the memory belongs to would use it again while the copy still reads it.

        Args:
            event: the event recorded after the copy.
            values: the memory, which holds gradients.
            unit: the number of the gradients' unit.
            flat: a number that identifies the unit's flat buffer.
            streams: the streams to one of which the memory belongs.
        """
        if unit != self._unit or flat in self._of_turn:  # another unit's gradients, or the next ones of the same
            self._turn, self._unit, self._of_turn = self._turn + 1, unit, set()
        self._of_turn.add(flat)
        self._leaving.append(_Leaving(event, values, streams, self._turn))
        self.make_room(IN_FLIGHT + 1)

    def make_room(self, units: int = IN_FLIGHT) -> None:
        """Free device memory whose copy has ended, and in any case all but that of the latest `units` units.

        Where the link is slower than backward, the streams of backward wait for a copy here, or device memory would fill with
        gradients. The host does not wait.
        """
        with self._leaving_lock:
            while self._leaving:
                first = self._leaving[0]
                if not first.event.query():
                    if self._turn - first.turn < units:
                        return
                    for stream in first.streams:
                        # Later work on these streams may reuse the memory, so each stream waits for the copy.
                        self.streams.wait(first.event, stream)
                self._leaving.popleft()

    def forget_arrived(self) -> None:
        """Free device memory whose copy has ended. May be called on any thread."""
        self.make_room(sys.maxsize)


@dataclass(eq=False)
class _Leaving:
    """Device memory that a copy to the host reads."""

    event: Any
    values: torch.Tensor
    streams: Sequence[Any]
    turn: int
