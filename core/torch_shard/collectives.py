"""The collectives for parameters and gradients: which group, which stream, how many bytes."""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .groups import backend_of, groups_for
from .log import logger
from .versions import at_least
from .watch import POLL, Channel, Pending, Watch, blocking

# torch 2.13 renamed the single-tensor collectives and warns about the old names; 2.11 and 2.12 lack the new ones.
_all_gather = getattr(dist, "all_gather_single" if at_least("2.13") else "all_gather_into_tensor", None)
_reduce_scatter = getattr(dist, "reduce_scatter_single" if at_least("2.13") else "reduce_scatter_tensor", None)


def _unowned_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory as bytes, without a reference to its storage: Gloo's all-gather makes views of what it is given,
    and its worker thread lets go of them some time after `wait` has returned. The engine reads the storage's use count to
    learn whether autograd saved something of it, and must not find Gloo there. The memory stays valid: it is released only
    after `wait`.
    """
    size = tensor.numel() * tensor.element_size()
    return torch.frombuffer((ctypes.c_char * size).from_address(tensor.data_ptr()), dtype=torch.uint8)


# Gloo's all-gather fills a buffer of its own and copies it to the output. A broadcast for each rank sends the same bytes
# straight to their place; with many ranks, the number of operations would cost more than that.
_BROADCASTS = 4


class _Works:
    """Several works, waited for as one."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def wait(self, timeout: timedelta | None = None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout.total_seconds()
        for work in self._works:
            if deadline is None or work.is_completed():
                work.wait()
            else:
                work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))


@dataclass(eq=False)
class SingleComm:
    """The scalar communicator of a group of one."""

    size: int = 1
    rank: int = 0
    refused: Callable[[str], str] | None = None  # see ScalarComm

    def all_reduce(self, tensor: torch.Tensor, op: str, what: str) -> torch.Tensor:
        return tensor

    def all_gather(self, tensor: torch.Tensor, what: str) -> torch.Tensor:
        return tensor.unsqueeze(0)


_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN} if dist.is_available() else {}


@dataclass(eq=False)
class ScalarComm:
    """Reductions that the user's own code asks for (norms, `full_tensor`): blocking, in a group of their own, so that
    they cannot pair with a gather or a gradient reduction of another rank."""

    channel: Channel
    watch: Watch
    size: int
    rank: int
    # Called with the message of an error about an operation that slices can't do; returns what to say instead.
    refused: Callable[[str], str] | None = None

    def all_reduce(self, tensor: torch.Tensor, op: str, what: str) -> torch.Tensor:
        self.watch.meet(what)
        blocking(self.watch, "scalar", what, dist.all_reduce, tensor, op=_OPS[op], ordered=self.watch.polls)
        return tensor

    def all_gather(self, tensor: torch.Tensor, what: str) -> torch.Tensor:
        out = tensor.new_empty((self.size, *tensor.shape))
        parts = out.view(-1), tensor.contiguous().view(-1)
        self.watch.meet(what)
        blocking(self.watch, "scalar", what, _all_gather, *parts, ordered=self.watch.polls)
        return out


def join(stream: Any, others: Iterable[Any]) -> None:
    """Have `stream` wait for what the others have been given so far."""
    for other in others:
        if other != stream:
            stream.wait_stream(other)


_AS_IT_IS = contextlib.nullcontext()


def outside_inference() -> contextlib.AbstractContextManager[Any]:
    """For memory that outlives a step: allocated inside inference_mode it would be an inference tensor, which a later
    training step can't use."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else _AS_IT_IS


@dataclass(eq=False)
class Collectives:
    """Gather and reduce for one engine. ``size`` is the number of ranks that share the parameters (1 under
    ``no_shard``), ``world`` the number whose gradients are averaged."""

    device: torch.device
    world: int
    world_rank: int
    size: int
    rank: int
    watch: Watch
    scalar: ScalarComm | SingleComm
    gather_channel: Channel | None = None
    reduce_channel: Channel | None = None
    backend: str = ""
    bytes_sent: int = 0
    gather_stream: Any = None
    reduce_stream: Any = None
    _spare: dict[Any, list[torch.Tensor]] = field(default_factory=dict)
    _expected: Counter[Any] = field(default_factory=Counter)

    def __post_init__(self) -> None:
        # Whether use counts of gathered memory say who else holds it, at one moment and alike on all ranks: backends may
        # keep references to what they have sent, and let go of them when they like.
        self.knows_references = self.device.type == "cpu" and self.backend in ("gloo", "fake")
        # Gloo does not know every dtype.
        self._sends_bytes = self.backend == "gloo" and self.device.type == "cpu"
        self._broadcasts = self._sends_bytes and 1 < self.size <= _BROADCASTS

    def __deepcopy__(self, memo: dict[int, Any]) -> Collectives:
        return self  # groups and streams belong to the process, not to a model

    def everyone(self) -> ScalarComm | SingleComm:
        """As `scalar`, over all ranks whose gradients are averaged: replicas, too."""
        if self.world == self.size:
            return self.scalar
        return ScalarComm(self.watch.channels["scalar"], self.watch, self.world, self.world_rank)

    # -- streams ------------------------------------------------------------------------------------------------
    def _on(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        if stream is None:
            return _AS_IT_IS
        # Hazard: the side stream must not overwrite or read a buffer before compute issued so far is through with it.
        stream.wait_stream(torch.cuda.current_stream(self.device))
        return torch.cuda.stream(stream)

    def is_capturing(self) -> bool:
        """Whether the device's current stream is being captured into a CUDA graph."""
        with torch.cuda.device(self.device):
            return torch.cuda.is_current_stream_capturing()

    def gathering(self) -> contextlib.AbstractContextManager[Any]:
        """The stream that owns gathered buffers: their storage is resized and filled here. For one use, at once."""
        return self._on(self.gather_stream)

    def reducing(self) -> contextlib.AbstractContextManager[Any]:
        """The stream on which gradients are reduced. For one use, at once."""
        return self._on(self.reduce_stream)

    def reduced(self) -> Any:
        """An event behind what that stream was given so far; None where there is no such stream."""
        if self.reduce_stream is None:
            return None
        event = torch.cuda.Event()
        event.record(self.reduce_stream)
        return event

    def _track(self, channel: Channel, what: str, work: Any, stream: Any) -> Pending:
        event = None
        if stream is not None:
            work.wait()  # orders the side stream behind NCCL's own; does not block the host
            event = torch.cuda.Event()
            event.record(stream)
        return Pending(self.watch, channel, channel.issued, what, work, event, self.device)

    # -- parameters ---------------------------------------------------------------------------------------------
    def payload(self, shard: torch.Tensor) -> torch.Tensor:
        """A shard as gathers send it."""
        return shard.view(torch.uint8) if self._sends_bytes else shard

    def slots_of(self, full: torch.Tensor) -> Sequence[torch.Tensor]:
        """The bytes of the ranks' slots of a buffer, where gathers work on those. Kept with the buffer, so that Gloo, which
        lets go of what it has sent some time after `wait` has returned, makes no difference to the buffer's use count."""
        return full.view(torch.uint8).view(self.size, -1).unbind(0) if self._broadcasts else ()

    def all_gather(
        self, full: torch.Tensor, sent: torch.Tensor, what: str, slots: Sequence[torch.Tensor] = ()
    ) -> Pending:
        """Fill `full` (1-D, ``size`` equal slots) with what the ranks send: `sent`, the :meth:`payload` of a shard, which may
        be the rank's own slot. `slots`: :meth:`slots_of` of `full`, where it is kept. Call under `gathering()`."""
        channel = self.gather_channel
        assert channel is not None and _all_gather is not None
        channel.count()
        self.bytes_sent += (self.size - 1) * (full.numel() // self.size) * full.element_size()
        if not full.numel():  # nothing but zero-element parameters
            return Pending(self.watch, channel, channel.issued, what, None)
        if self._broadcasts:
            slots = slots or self.slots_of(full)
            if sent.data_ptr() != slots[self.rank].data_ptr():
                slots[self.rank].copy_(sent)
            pairs = zip(slots, self.watch.ranks, strict=True)
            work: Any = _Works([dist.broadcast(s, src=r, group=channel.group, async_op=True) for s, r in pairs])
        else:
            into = _unowned_bytes(full) if self._sends_bytes else full
            work = _all_gather(into, sent, group=channel.group, async_op=True)
        channel.groups.written[work] = full
        return self._track(channel, what, work, self.gather_stream)

    # -- gradients ----------------------------------------------------------------------------------------------
    def expect(self, buffers: Sequence[tuple[int, torch.dtype]]) -> None:
        """Which buffers the backward that begins will reduce: what it gives back is kept for those to come only."""
        self._expected = Counter(buffers) + Counter(buffers)  # its own, and one for what is received

    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A 1-D buffer, reused in a fixed pattern (the CUDA caching allocator does this by itself)."""
        key = numel, dtype
        spare = self._spare.get(key)
        found = spare.pop() if spare else None
        self._expected[key] -= 1
        if self._expected[key] <= 0:
            self._spare.pop(key, None)
        if found is not None:
            return found
        with outside_inference():
            return torch.empty(numel, dtype=dtype, device=self.device)

    def give(self, buffer: torch.Tensor) -> None:
        key = buffer.numel(), buffer.dtype
        if self.reduce_stream is None and self._expected[key] > 0:
            self._spare.setdefault(key, []).append(buffer)

    @property
    def in_one_order(self) -> bool:
        """Whether gathers and reductions share a communicator, where all ranks must issue both in one order."""
        return (
            self.gather_channel is not None
            and self.reduce_channel is not None
            and (self.gather_channel.group is self.reduce_channel.group)
        )

    def forget_ended(self) -> None:
        """Let go of the buffers of collectives that have ended without anybody waiting for them."""
        if self.reduce_channel is not None:
            self.reduce_channel.groups.forget_ended()

    def drop_spares(self) -> None:
        self._spare.clear()

    def reduce(self, grad: torch.Tensor, what: str, streams: Sequence[Any] = ()) -> Reduction:
        """Sum `grad` (1-D, already divided by the number of ranks) over the ranks; each keeps its own slot. `streams` are
        those that have written to it, beside the current one."""
        channel = self.reduce_channel
        assert channel is not None
        channel.count()
        nbytes = grad.numel() * grad.element_size()
        with self._on(self.reduce_stream):
            begun = None
            if self.reduce_stream is not None:
                join(self.reduce_stream, streams)
                begun = torch.cuda.Event()
                begun.record(self.reduce_stream)
            if self.size == 1:  # replicated parameters
                self.bytes_sent += 2 * nbytes * (self.world - 1) // self.world
                work = dist.all_reduce(grad, group=channel.group, async_op=True)
                channel.groups.written[work] = grad
                return Reduction(self, grad, grad, self._track(channel, what, work, self.reduce_stream), begun, streams)
            self.bytes_sent += nbytes * (self.size - 1) // self.size
            if self.backend == "gloo":
                # Gloo's reduce-scatter sends the bytes of an all-reduce; all-to-all and a local sum send half.
                received = self.take(grad.numel(), grad.dtype)
                work = dist.all_to_all_single(received, grad, group=channel.group, async_op=True)
            else:
                received = torch.empty(grad.numel() // self.size, dtype=grad.dtype, device=grad.device)
                assert _reduce_scatter is not None
                work = _reduce_scatter(received, grad, group=channel.group, async_op=True)
            # A backward that fails drops its reductions, but not what they still read and write.
            channel.groups.written[work] = (grad, received)
            return Reduction(self, grad, received, self._track(channel, what, work, self.reduce_stream), begun, streams)

    # -- whole matrices -----------------------------------------------------------------------------------------
    def all_to_all(
        self,
        received: torch.Tensor,
        sent: torch.Tensor,
        received_sizes: list[int],
        sent_sizes: list[int],
        what: str,
    ) -> Pending:
        """Send each rank its part of `sent` and fill `received` with theirs: 1-D, bytes; the sizes are those of the parts, by
        rank. Every rank knows all sizes, so none are exchanged."""
        channel = self.reduce_channel
        assert channel is not None
        channel.count()
        self.bytes_sent += sum(sent_sizes) - sent_sizes[self.rank]
        if self.backend == "fake":  # no rank answers; what was in the memory before is no answer, nor is torch's own
            received.zero_()
            return Pending(self.watch, channel, channel.issued, what, None)
        with self._on(self.reduce_stream):
            work = dist.all_to_all_single(
                received, sent, received_sizes, sent_sizes, group=channel.group, async_op=True
            )
            channel.groups.written[work] = (sent, received)
            return self._track(channel, what, work, self.reduce_stream)

    def close(self) -> None:
        self.drop_spares()


@dataclass(eq=False)
class Reduction:
    """A gradient reduction in flight; ``finish`` returns this rank's slice of the sum."""

    collectives: Collectives
    grad: torch.Tensor
    received: torch.Tensor
    pending: Pending
    begun: Any = None  # CUDA: recorded where this rank's own gradients are ready
    streams: Sequence[Any] = ()  # CUDA: those that wrote to `grad`

    def done(self) -> bool:
        return self.pending.done()

    def abandon(self, seconds: float) -> None:
        """A partner may never come: don't wait for long."""
        self.pending.settle(seconds)

    def wait_for_own_part(self) -> None:
        """Have the host wait until this rank's device has come to the reduction. What then remains is the partners' time."""
        if self.begun is None:
            return
        deadline = time.monotonic() + self.collectives.watch.timeout
        while not self.begun.query() and time.monotonic() < deadline:
            time.sleep(POLL)

    def finish(self, dtype: torch.dtype) -> torch.Tensor:
        """This rank's slice of the sum, in `dtype`."""
        c = self.collectives
        for stream in self.streams:
            # Hazard: the buffer's memory goes back to the stream that it was made on, which may not be the one that
            # publishes, and must not be used there again before the collective has read it.
            stream.wait_event(self.pending.event)
        self.pending.wait()
        if c.backend == "gloo" and self.received is not self.grad:
            out = _sum(self.received.view(c.size, -1), dtype)
            c.give(self.grad)
            c.give(self.received)
            return out
        if self.received.dtype != dtype:
            out = self.received.to(dtype)
            c.give(self.grad)
            return out
        if self.received is not self.grad:  # else an all-reduce in place: the buffer itself is the result
            c.give(self.grad)
        return self.received


def _sum(chunks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The sum of the rows in `dtype`, rounded once."""
    if chunks.dtype == dtype:
        return torch.add(chunks[0], chunks[1]) if len(chunks) == 2 else chunks.sum(dim=0)
    out = chunks[0].to(dtype)
    for chunk in chunks[1:]:
        out += chunk
    return out


def connect(group: Any, device: torch.device, *, shard: bool, timeout: float, single_communicator: bool) -> Collectives:
    """Collective over `group`. `group` None: one rank alone, no process group at all."""
    if group is None or dist.get_world_size(group) == 1:
        watch = Watch(0, 1, [0], timeout, "")
        return Collectives(device, 1, 0, 1, 0, watch, SingleComm())
    ranks = dist.get_process_group_ranks(group)
    rank, world = dist.get_rank(group), len(ranks)
    groups = groups_for(group, single_communicator, timeout)
    groups.forget_ended()
    watch = Watch(rank, world, ranks, timeout, groups.key)
    channels = {n: Channel(n, groups) for n in ("gather", "reduce", "scalar", "control", "meet")}
    watch.channels = channels
    backend = backend_of(group, device.type)
    side = backend == "nccl"
    watch.polls = side
    logger.debug("collectives over ranks %s, backend %s", ranks, backend)
    streams = groups.streams_on(device) if side else (None, None)
    return Collectives(
        device=device,
        world=world,
        world_rank=rank,
        size=world if shard else 1,
        rank=rank if shard else 0,
        watch=watch,
        scalar=ScalarComm(channels["scalar"], watch, world, rank) if shard else SingleComm(),
        gather_channel=channels["gather"],
        reduce_channel=channels["reduce"],
        backend=backend,
        gather_stream=streams[0],
        reduce_stream=streams[1],
    )
