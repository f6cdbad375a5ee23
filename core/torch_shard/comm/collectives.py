"""The collectives for parameters and gradients: each one's process group, stream, and count of bytes."""

from __future__ import annotations

import contextlib
import ctypes
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from ..layout.rank_topology import Topology
from ..utils.autograd_private import outside_saved_tensors_hooks
from ..utils.profiled_ranges import profiling, started
from ..versions import counts_references
from . import process_group_ops
from .gradient_reduction import Reduction
from .one_sided.service import Service
from .registered_memory import RegisteredMemory
from .small_collectives import ScalarComm
from .spare_buffers import SpareBuffers
from .streams import like_nccl, streams_of
from .watchdog import Watchdog, blocking
from .work import Channel, OnStream, Pending, raise_if_lost


def _unowned_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor's memory as bytes, without a reference to its storage.

    Gloo's all-gather makes views of its tensors, and its worker thread drops them some time after `wait` has returned. The
    engine reads the storage's use count to learn whether autograd saved a view of it, and must not count Gloo's views. The
    memory stays valid, because it is released only after `wait`.
    """
    return torch.frombuffer((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr()), dtype=torch.uint8)


# The most ranks for which Gloo's all-gather is replaced by one broadcast from each rank. Gloo's all-gather fills a buffer of its
# own and copies it to the output, while a broadcast receives into the output itself. With many ranks, the number of operations
# would cost more than the copy.
_BROADCASTS = 4


_NO_CONTEXT = contextlib.nullcontext()


def outside_inference() -> contextlib.AbstractContextManager[Any]:
    """Return a context in which inference_mode is off, for allocating memory that outlives a step.

    Memory allocated inside inference_mode would be an inference tensor, which a later training step can't use.
    """
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else _NO_CONTEXT


@contextlib.contextmanager
def both(
    first: contextlib.AbstractContextManager[Any], second: contextlib.AbstractContextManager[Any]
) -> Iterator[None]:
    """Enter both contexts."""
    with first, second:
        yield


@dataclass(eq=False)
class Collectives:
    """The collectives of one engine, on one rank.

    Attributes:
        scalar: the blocking collectives over the ranks that share a replica.
        all_ranks: the blocking collectives over all ranks.
        data_parallel: the blocking collectives over the ranks whose gradients are averaged (the data-parallel group).
        full_model: the blocking collectives over the ranks that together have one replica of every tensor-parallel part.
        gather_channel: over the ranks that share a replica. The channels are None for one rank alone.
        reduce_channel: over the same ranks; if each rank has a full replica, over the data-parallel group.
        replica_channel: over the ranks that have this shard, for inter-replica all-reduces under a hybrid strategy.
        tp_replica_channel: over the ranks with this shard of parameters that are equal in all data-parallel groups.
        secondary_channel: over the ranks that keep secondary shards of a unit between forward and backward.
        bytes_sent: bytes that this rank has sent of its own data, whichever way the backend takes. In a gather or an exchange
            that is the rank's slot once for each other rank; in a reduce-scatter over n ranks (n-1)/n of the buffer; in an
            all-reduce twice that; in a broadcast or a scatter what every other rank receives, counted at the source alone.
            Summed over the ranks it is the number of bytes that the ranks receive.
        bytes_sent_across: the part of `bytes_sent` that went between replicas.
        waiting: the reductions that wait for their inter-replica all-reduce, see :class:`.process_groups.ProcessGroups`.
        gather_stream, reduce_stream: the streams for gathers and for reductions; None on the CPU.
        replica_stream: the stream for all-reduces between replicas, which don't hold up the next reduction within a replica.
        released: streams that may still compute with memory which was allocated on the gather stream and is free since.
        memory: the pool from which gathers and reductions take their memory; None for the device's usual pool.
        world, world_rank: the number of the engine's ranks, and the number of this rank among them.
        size, rank: the number of ranks that share one replica of the parameters, and the number of this rank among them.
        data_parallel_size: the number of ranks whose gradients are averaged: all of them, unless there is tensor parallelism.
    """

    device: torch.device
    watchdog: Watchdog
    topology: Topology
    scalar: ScalarComm
    all_ranks: ScalarComm
    data_parallel: ScalarComm
    full_model: ScalarComm
    gather_channel: Channel | None = None
    reduce_channel: Channel | None = None
    replica_channel: Channel | None = None
    tp_replica_channel: Channel | None = None
    secondary_channel: Channel | None = None
    backend: str = ""
    bytes_sent: int = 0
    bytes_sent_across: int = 0
    waiting: deque[Reduction] = field(default_factory=deque)
    gather_stream: Any = None
    reduce_stream: Any = None
    replica_stream: Any = None
    released: set[Any] = field(default_factory=set)
    memory: RegisteredMemory | None = None
    _spares: SpareBuffers[torch.Tensor] = field(default_factory=SpareBuffers)

    def __post_init__(self) -> None:
        self.streams = streams_of(self.device)
        self.world, self.world_rank = self.topology.world, self.watchdog.rank
        self.size, self.data_parallel_size = self.topology.size, self.topology.data_parallel_size
        self.rank = self.topology.shard_group_of(self.world_rank).index(self.world_rank)
        self.counts_references = counts_references()
        # True if the use counts of gathered memory tell, equally on all ranks, whether anyone else holds it. Other backends may
        # keep references to tensors that they have sent, and drop them at any time.
        self.knows_references = (
            self.counts_references and self.device.type == "cpu" and self.backend in ("gloo", "fake")
        )
        # True if the backend can divide a sum by the number of ranks, and fill several buffers by one gather.
        self.averages = self.coalesces = like_nccl(self.backend)
        # Gloo does not know every dtype.
        self._sends_bytes = self.backend == "gloo" and self.device.type == "cpu"
        self._broadcasts = self._sends_bytes and 1 < self.size <= _BROADCASTS
        # True if a reduction's result has no narrower dtype than `.grad`, whatever dtype was sent: the sum is made locally.
        self.sums_wide = self.backend == "gloo" and self.size > 1 and not self.topology.is_hybrid

    def __deepcopy__(self, memo: dict[int, Any]) -> Collectives:
        return self  # groups and streams belong to the process, not to a model

    @property
    def service(self) -> Service | None:
        """The service that hands out this rank's shards to ranks that read alone; None if there is no other rank."""
        return None if self.gather_channel is None else self.gather_channel.groups.comparisons.service

    @property
    def all_bytes_sent(self) -> int:
        """The bytes that this rank has sent, including what was gathered for the user's own code."""
        comms = {id(comm): comm for comm in (self.scalar, self.all_ranks, self.data_parallel, self.full_model)}
        return self.bytes_sent + sum(comm.bytes_sent for comm in comms.values())

    # -- streams ------------------------------------------------------------------------------------------------
    def _on(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        # Hazard: the side stream must not overwrite or read a buffer before compute issued so far has finished with it.
        if stream is None:
            return _NO_CONTEXT
        follow = self.streams.follow(stream)
        return follow if self.memory is None else both(follow, self.memory.use())

    def gathering(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context of the gather stream, on which gathered buffers are resized and filled.

        The context must be entered at once, and only once.
        """
        if self.released:
            # Hazard: the stream's next allocation may be memory with which these still compute.
            self.released.discard(self.streams.current())  # which the stream follows
            self.streams.join(self.gather_stream, self.released)
            self.released.clear()
        return self._on(self.gather_stream)

    def reducing(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context of the stream on which gradients are reduced. It must be entered at once, and only once."""
        return self._on(self.reduce_stream)

    def reduced(self) -> Any:
        """Return an event after all work of the reduction stream so far; None if there is no such stream."""
        return None if self.reduce_stream is None else self.streams.record(self.reduce_stream)

    def _start(
        self, channel: Channel, what: str, stream: Any, operation: Callable[..., Any], *args: Any, keeps: Any = None
    ) -> Pending:
        """Start a collective on the group of `channel`, and return the collective in flight.

        Args:
            channel: the channel, which counts the collective.
            what: the name of the operation, for error messages.
            stream: the current stream, on which the collective runs; None on the CPU.
            operation: a function of :mod:`.process_group_ops`.
            args: the arguments of `operation` after the group.
            keeps: a buffer over whose memory `args` has views that don't keep it alive.

        Raises:
            DivergenceError: see :meth:`.work.Channel.count`.
            MissingRankError: the backend knows that another rank has ended. NCCL says so in the call, if it sends by network.
        """
        number, event = channel.count(), None
        try:
            if profiling():
                with started(what):
                    work = outside_saved_tensors_hooks(operation, channel.group, *args)
            else:
                work = outside_saved_tensors_hooks(operation, channel.group, *args)
        except dist.DistBackendError as error:
            raise_if_lost(self.watchdog, channel, what, error)
            raise
        if stream is not None:
            if work is not None:
                work.wait()  # the backend has used a stream of its own; does not block the host
            event = self.streams.record(stream)
            work = OnStream(event)
        # A backward that fails drops its reductions, but the buffers that they still read and write must live.
        channel.groups.buffers[work] = keeps, args
        return Pending(self.watchdog, channel, number, what, work, event, self.streams)

    # -- parameters ---------------------------------------------------------------------------------------------
    def payload(self, shard: torch.Tensor) -> torch.Tensor:
        """Return a shard in the form in which gathers send it: as bytes if the backend does not know every dtype."""
        return shard.view(torch.uint8) if self._sends_bytes else shard

    def slots_of(self, full: torch.Tensor) -> Sequence[torch.Tensor]:
        """Return the ranks' slots of a buffer, as bytes, if gathers work on slots; else ().

        The slots are kept with the buffer. Gloo drops its references to tensors some time after `wait` has returned, and
        references to kept slots don't change the buffer's use count.
        """
        return full.view(torch.uint8).view(self.size, -1).unbind(0) if self._broadcasts else ()

    def all_gather(
        self, full: torch.Tensor, sent: torch.Tensor, what: str, slots: Sequence[torch.Tensor] = ()
    ) -> Pending:
        """Fill `full` with the ranks' shards. Collective and asynchronous; call under `gathering()`.

        Args:
            full: 1-D, with ``size`` equal slots.
            sent: the :meth:`payload` of this rank's shard, which may be this rank's slot of `full`.
            what: the name of the operation, for error messages.
            slots: the :meth:`slots_of` of `full`, if the caller has kept them.
        """
        assert self.gather_channel is not None
        return self._gather(self.gather_channel, full, sent, what, slots)

    def all_gather_coalesced(self, full: Sequence[torch.Tensor], sent: Sequence[torch.Tensor], what: str) -> Pending:
        """Fill several buffers as :meth:`all_gather` does one, in one launch; for backends that do that (:attr:`coalesces`).

        Collective and asynchronous; call under `gathering()`.
        """
        channel = self.gather_channel
        assert channel is not None
        self.bytes_sent += sum((self.size - 1) * shard.nbytes for shard in sent)
        operation, stream = process_group_ops.all_gather_coalesced, self.gather_stream
        return self._start(channel, what, stream, operation, full, sent, stream is not None)

    def secondary_part(self, full: torch.Tensor) -> torch.Tensor:
        """Return this rank's secondary shard: the part of a gathered buffer that it keeps between forward and backward."""
        assert self.secondary_channel is not None
        members = self.secondary_channel.members
        n = full.numel() // len(members)
        return full.narrow(0, members.index(self.world_rank) * n, n)

    def all_gather_secondary(self, full: torch.Tensor, what: str) -> Pending:
        """Fill `full` from the secondary shards; this rank's is in its place already. Collective; call under `gathering()`."""
        assert self.secondary_channel is not None
        return self._gather(self.secondary_channel, full, self.payload(self.secondary_part(full)), what)

    def _gather(
        self, channel: Channel, full: torch.Tensor, sent: torch.Tensor, what: str, slots: Sequence[torch.Tensor] = ()
    ) -> Pending:
        ranks = len(channel.members)
        self.bytes_sent += (ranks - 1) * (full.numel() // ranks) * full.element_size()
        if not full.numel():  # nothing but zero-element parameters
            return Pending(self.watchdog, channel, channel.count(), what, None)
        if self._sends_bytes and ranks <= _BROADCASTS:
            slots = slots or full.view(torch.uint8).view(ranks, -1).unbind(0)
            own = slots[channel.members.index(self.world_rank)]
            if sent.data_ptr() != own.data_ptr():
                own.copy_(sent)
            return self._start(channel, what, None, process_group_ops.broadcast_each, slots)
        into, stream = _unowned_bytes(full) if self._sends_bytes else full, self.gather_stream
        operation = process_group_ops.all_gather
        return self._start(channel, what, stream, operation, into, sent, stream is not None, keeps=full)

    # -- gradients ----------------------------------------------------------------------------------------------
    def expect(self, buffers: Sequence[tuple[int, torch.dtype]]) -> None:
        """Declare the buffers that the reductions of the coming backward will take, by length and dtype."""
        self._spares.expect(buffers)

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a 1-D buffer, a spare one if there is one. (On GPUs the CUDA caching allocator reuses memory by itself.)"""
        found = self._spares.take((numel, dtype))
        if found is not None:
            return found
        with outside_inference(), _NO_CONTEXT if self.memory is None else self.memory.use():
            return torch.empty(numel, dtype=dtype, device=self.device)

    def give(self, buffer: torch.Tensor) -> None:
        """Give back a buffer of :meth:`take`."""
        if self.reduce_stream is None:
            self._spares.give((buffer.numel(), buffer.dtype), buffer)

    @property
    def in_one_order(self) -> bool:
        """True if gathers and reductions share a communicator, so that all ranks must issue both in one order."""
        return (
            self.gather_channel is not None
            and self.reduce_channel is not None
            and (self.gather_channel.group is self.reduce_channel.group)
        )

    def forget_ended(self) -> None:
        """Drop the buffers of collectives that have ended without anybody waiting for them."""
        if self.reduce_channel is not None:
            self.reduce_channel.groups.forget_ended()

    def drop_spares(self) -> None:
        """Release the spare buffers."""
        self._spares.drop()

    def reduce(self, grad: torch.Tensor, what: str, streams: Sequence[Any] = (), mean: bool = False) -> Reduction:
        """Begin to sum `grad` over the ranks; each rank gets its own slot of the sum. Collective.

        Args:
            grad: 1-D.
            what: the name of the operation, for error messages.
            streams: the streams that have written to `grad`, for which the current one has waited.
            mean: divide the sum by the number of ranks, where the backend does that (:attr:`averages`).
        """
        channel = self.reduce_channel
        assert channel is not None
        with self._on(self.reduce_stream):
            begun = self.reduced()
            if self.size == 1:  # replicated parameters
                summed = self.all_reduce(channel, grad, what, self.reduce_stream, mean)
                return Reduction(self, grad, grad, summed, begun, streams)
            self.bytes_sent += grad.nbytes * (self.size - 1) // self.size
            stream = self.reduce_stream
            if self.backend == "gloo":
                # Gloo's reduce-scatter sends the bytes of an all-reduce; all-to-all and a local sum send half.
                received = self.take(grad.numel(), grad.dtype)
                operation: Callable[..., Any] = process_group_ops.all_to_all
            else:
                received = torch.empty(grad.numel() // self.size, dtype=grad.dtype, device=grad.device)
                operation = partial(process_group_ops.reduce_scatter, on_stream=stream is not None, mean=mean)
            pending = self._start(channel, what, stream, operation, received, grad)
            inter_replica = "" if self.replica_channel is None else f"{what}, between replicas"
            if inter_replica and self.reduce_stream is not None:
                # The streams order both collectives, so the host need not wait for the reduce-scatter.
                pending = self.followed(pending, self.all_reduce_between_replicas(received, inter_replica, mean))
            reduction = Reduction(self, grad, received, pending, begun, streams)
            if inter_replica and self.reduce_stream is None:
                reduction.queue_inter_replica(inter_replica)
            return reduction

    def all_reduce(
        self, channel: Channel, tensor: torch.Tensor, what: str, stream: Any = None, mean: bool = False
    ) -> Pending:
        """Begin to sum `tensor` over replicas, or take the `mean`, in place. Collective; `stream` is the current one, if any."""
        ranks = len(channel.members)
        sent = 2 * tensor.nbytes * (ranks - 1) // ranks
        self.bytes_sent += sent
        self.bytes_sent_across += sent
        return self._start(channel, what, stream, process_group_ops.all_reduce, tensor, stream is not None, mean)

    def all_reduce_between_replicas(self, own: torch.Tensor, what: str, mean: bool = False) -> Pending:
        """Begin to sum this rank's shard, 1-D, with the same shard of the other replicas, in place. Call under `reducing()`."""
        assert self.replica_channel is not None
        self.send_waiting()
        with self._on(self.replica_stream):  # after the reduction within the replica
            return self.all_reduce(self.replica_channel, own, what, self.replica_stream, mean)

    @staticmethod
    def followed(first: Pending, second: Pending) -> Pending:
        """Return `second`, which runs after `first` on the device, so that waiting for it releases the buffers of both."""
        written = second.channel.groups.buffers
        written[second.work] = (written.pop(first.work, None), written[second.work])
        return second

    def send_waiting(self) -> None:
        """Begin the inter-replica all-reduces of all waiting reductions, which come before the next collective there."""
        while self.waiting:
            self.waiting[0].begin_inter_replica()

    # -- matrices that one rank steps -----------------------------------------------------------------------------------------
    def all_to_all(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_sizes: list[int],
        sent_sizes: list[int],
        what: str,
    ) -> Pending:
        """Send each rank its part of `sent`, and fill `received` with the parts received from the ranks. Collective.

        Both tensors are 1-D, of bytes, and the sizes are those of their parts, by rank. Every rank knows all sizes, so no
        sizes are exchanged.
        """
        channel = self.reduce_channel
        assert channel is not None
        self.bytes_sent += sum(sent_sizes) - sent_sizes[self.rank]
        if self.backend == "fake":  # no other rank exists: zeros stand for the parts of the others
            received.zero_()
            return Pending(self.watchdog, channel, channel.count(), what, None)
        with self._on(self.reduce_stream):
            stream, operation, sizes = self.reduce_stream, process_group_ops.all_to_all, (received_sizes, sent_sizes)
            return self._start(channel, what, stream, operation, received, sent, sizes, stream is not None)

    # -- from one rank to others --------------------------------------------------------------------------------
    def broadcast(
        self, tensor: torch.Tensor, source: int, what: str, channel: Channel | None = None, ordered: bool = False
    ) -> None:
        """Overwrite `tensor` on each rank of `channel` with the tensor of the engine's rank `source`, and wait. Collective.

        By default the channel has all ranks of the engine. `ordered` has the meaning that :class:`.work.Pending` gives it.
        """
        channel = self.watchdog.channels["reduce"] if channel is None else channel
        blocking(
            self.watchdog, channel.name, what, dist.broadcast, tensor, src=self.watchdog.ranks[source], ordered=ordered
        )
        if self.world_rank == source:
            sent = tensor.nbytes * (len(channel.members) - 1)
            self.bytes_sent += sent
            if self.size == 1 or channel in (self.replica_channel, self.tp_replica_channel):
                self.bytes_sent_across += sent

    def scatter(self, into: torch.Tensor, parts: Sequence[torch.Tensor] | None, source: int, what: str) -> None:
        """Fill `into` with this rank's tensor of `parts`, and wait. Collective.

        The engine's rank `source` passes `parts`, one for each rank in the order of the ranks; the others pass None.
        """
        given = None if parts is None else list(parts)
        blocking(self.watchdog, "reduce", what, dist.scatter, into, given, src=self.watchdog.ranks[source])
        if self.world_rank == source:
            self.bytes_sent += into.nbytes * (self.world - 1)
            self.bytes_sent_across += into.nbytes * (self.world - self.size * self.topology.data_parallel_groups)

    # -- messages: CPU tensors, which do not count as bytes sent --------------------------------------------------
    def broadcast_message(self, message: torch.Tensor, source: int, what: str) -> None:
        """Overwrite a CPU tensor on every rank with that of the engine's rank `source`, and wait. Collective."""
        blocking(self.watchdog, "message", what, dist.broadcast, message, src=self.watchdog.ranks[source])

    def maximum(self, message: torch.Tensor, what: str) -> None:
        """Replace the elements of a CPU tensor with their maxima over all ranks, and wait. Collective."""
        blocking(self.watchdog, "message", what, dist.all_reduce, message, op=dist.ReduceOp.MAX)
