"""One flat buffer's reduced gradients on their way to host memory, and what is done to them there.

Gradients cross in the dtype in which they were reduced. Where ``.grad`` has a wider one, the host thread casts them when it adds
them up or puts them into place, and takes their norms in the same pass. The cast is exact, so that the results are those of a
cast on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeAlias

import torch

from ..utils.autograd_private import storage_uses
from .host import Host
from .host_thread import Task
from .pending_writes import Copying, PendingWrites, Work

PIECE = 1 << 16
"""Elements of which norms are taken at once in host memory: torch adds in fp32 one after the other there."""
_SPARE = 2  # buffers that are kept between backwards
_CHUNK = 1 << 20  # elements that are added, and whose norms are taken while they are in cache

_Norms: TypeAlias = dict[float, list[torch.Tensor]]  # by order: those of the pieces


class HostGradients:
    """The gradients of one flat buffer in host memory.

    Attributes:
        pending_writes: the work on the gradients. The work on the shard is another: a forward need not wait for gradients.
    """

    def __init__(self, host: Host, numel: int, unit: int) -> None:
        """Take no memory yet; see :meth:`prepare`. `numel`: elements of the shard. `unit`: number of the unit."""
        self.host, self.pending_writes = host, PendingWrites(host)
        self._numel, self._unit = numel, unit
        # Each with the number of references to its storage while it is unused.
        self._buffers: list[tuple[torch.Tensor, int]] = []
        self._known = False  # the norms of what the latest work writes were taken on the device

    def prepare(self, dtype: torch.dtype) -> None:
        """Take memory for gradients of this dtype.

        Raises:
            HostMemoryError: there is no memory.
        """
        if not self._buffers:
            self._take(dtype)

    def _take(self, dtype: torch.dtype) -> torch.Tensor:
        """Return memory to which nothing refers any more: a gradient that the user keeps stays as it was."""
        for buffer, alone in self._buffers:
            if buffer.dtype == dtype and storage_uses(buffer) == alone:
                return buffer.detach()
        buffer = self.host.empty(self._numel, dtype)
        if len(self._buffers) < _SPARE:
            self._buffers.append((buffer, storage_uses(buffer)))
        return buffer.detach()

    def receive(
        self, result: torch.Tensor, dtype: torch.dtype, factor: float = 1.0, streams: Sequence[Any] = ()
    ) -> torch.Tensor:
        """Begin to copy a reduced gradient to host memory; return that memory, in `dtype`.

        Sharded tensors that are made over the returned memory have to wait (``pending_writes.block_reads``).

        Args:
            result: 1-D, on the device, in `dtype` or a narrower one, and not used by anything else.
            dtype: the dtype of ``.grad``.
            factor: the values are multiplied with it in host memory, where `result` is narrower.
            streams: streams that the memory of `result` may belong to, beside the current one.
        """
        self.pending_writes.restore_if_done()  # what a step has read may be used again
        into = self._take(dtype)
        into._pending_writes = self.pending_writes  # type: ignore[attr-defined]
        known = self._norms_there(result, dtype, factor) if self.host.streams.exist else None
        if known is not None and result.dtype == dtype:
            self.host.arrived += result.nbytes
            self._begin(Copying(self._leave(result, into, streams), writes=True), known=True)
            _note(into, known)
            return into
        if known is not None:
            into._norms = (None, known)  # type: ignore[attr-defined]  # of what is to be written next
        task = self._arrive(result, dtype, streams, lambda arrived: self._write(into, arrived, factor, known=known))
        self._begin(task, known=known is not None)
        return into

    def add(
        self,
        base: torch.Tensor,
        result: torch.Tensor,
        grads: Iterable[Any],
        factor: float = 1.0,
        streams: Sequence[Any] = (),
    ) -> None:
        """Begin to add `result` to `base`, in host memory, over which the sharded tensors `grads` lie.

        `result`, `factor` and `streams` are those of :meth:`receive`.
        """

        def write(arrived: torch.Tensor) -> None:
            self._write(base, arrived, factor, adds=True)

        self.pending_writes.start_deferred()
        self._begin(self._arrive(result, base.dtype, streams, write), grads)

    def _begin(self, work: Work, tensors: Iterable[Any] = (), known: bool = False) -> None:
        self._known = known
        self.pending_writes.begin(work, tensors)

    # -- from the device ------------------------------------------------------------------------------------------
    def _arrive(
        self, result: torch.Tensor, dtype: torch.dtype, streams: Sequence[Any], write: Callable[[torch.Tensor], None]
    ) -> Task:
        """Make the host thread call `write` with `result`, once that is in host memory."""
        self.host.arrived += result.nbytes
        staged, event, arrived = None, None, result
        if result.dtype != dtype:
            staged, arrived = self.host.staging.take(result)
        elif self.host.streams.exist:
            arrived = self._take(dtype)
        if arrived is not result:  # else `result` is in host memory already, and belongs to the thread now
            event = self._leave(result, arrived, streams)

        def work() -> None:
            if event is not None:
                event.synchronize()
            write(arrived)

        task = self.host.thread.do(work)
        if staged is not None:
            staged.task = task
        return task

    def _leave(self, result: torch.Tensor, into: torch.Tensor, streams: Sequence[Any]) -> Any:
        """Copy `result` to `into`; return the event after a copy from a device, which goes on in the background, else None."""
        device, reducing = self.host.streams, self.host.collectives.reduce_stream
        if not device.exist:
            into.copy_(result)
            return None
        here = device.current()
        with self.host.leaving():
            into.copy_(result, non_blocking=True)
            # A thread that waits for a blocking event sleeps, and leaves the core to the optimizer's step.
            event = device.record(sleeps=True)
        owners = dict.fromkeys([here, *streams] if reducing is None else [here, *streams, reducing])
        self.host.keep(event, result, self._unit, id(self), list(owners))
        return event

    def _norms_there(self, result: torch.Tensor, dtype: torch.dtype, factor: float) -> _Norms:
        """Take the norms of what ``.grad`` will hold, on the device: of all values at once, as without offload, or by pieces."""
        if factor == 1.0:
            return {p: _norms_of([result], p, dtype) for p in self.host.norms}
        found: _Norms = {p: [] for p in self.host.norms}
        for piece in result.split(4 * _CHUNK) if found else ():
            values = [piece.to(dtype).mul_(factor)]
            for p, norms in found.items():
                norms += _norms_of(values, p, dtype)
        return found

    # -- on the host thread ---------------------------------------------------------------------------------------
    def _write(
        self,
        into: torch.Tensor,
        arrived: torch.Tensor,
        factor: float,
        adds: bool = False,
        known: _Norms | None = None,
    ) -> None:
        """Cast `arrived`, multiply it, add it to `into` or put it there. Take norms of the outcome unless they are `known`."""
        # The set is copied first: the training thread may add an order at any time.
        found: _Norms = {p: [] for p in tuple(self.host.norms)} if known is None else known
        casts, numel = arrived.dtype != into.dtype, max(1, into.numel())
        length = PIECE if numel > 2 * PIECE else numel
        chunk = _CHUNK if casts or (found and known is None) else numel
        for own, new in zip(into.split(chunk), arrived.split(chunk), strict=True):
            values = new.to(own.dtype) if casts and adds else new
            if adds:
                own.add_(values if factor == 1.0 else values.mul_(factor))
            else:
                own.copy_(values)
                if factor != 1.0:
                    own.mul_(factor)
            for p, norms in found.items() if known is None else ():
                norms += _norms_of(own.split(length), p, own.dtype)
        _note(into, found)

    # -- for clipping ---------------------------------------------------------------------------------------------
    def norms(self, base: torch.Tensor, p: float) -> list[torch.Tensor] | None:
        """Return the norms of the pieces of `base`, in which all gradients lie, if they were taken on the way and still hold.

        Otherwise return None. This waits for what the host adds and scales, but for no copy from a GPU.
        """
        self.host.norms.add(p)  # so that they are taken next time
        if not self._known:
            self.pending_writes.wait()
        # With tensors over memory that the user was given, no version shows an edit.
        noted = None if self.pending_writes.exposed else getattr(base, "_norms", None)
        # Norms without a version are those of values that are still being written. An edit waits for these first.
        return noted[1].get(p) if noted is not None and noted[0] in (None, base._version) else None

    def scale(
        self, base: torch.Tensor, factor: torch.Tensor, gaps: Sequence[tuple[int, int]], grads: Iterable[Any]
    ) -> None:
        """Multiply `base` by a 0-d factor, which may still be on its way.

        Args:
            base: the gradients, in host memory.
            factor: the factor, on the device.
            gaps: ranges of padding in `base`.
            grads: the sharded tensors over `base`.
        """
        known, event = factor, None
        if self.host.streams.exist:
            # Hazards: the norms were taken before the gradients are here, so these may still arrive when the factor is known; and
            # the stream that computes the factor is not the host thread's.
            with self.host.leaving():
                known = factor.to("cpu", non_blocking=True)
                event = self.host.streams.record()

        # Hazard: the stream that computes the factor would use its memory again. The task keeps it until the copy has ended.
        def work(factor: torch.Tensor = factor) -> None:
            if event is not None:
                event.synchronize()
            if known == 1.0:
                return
            base.mul_(known)
            if known.isnan():  # zero times NaN: the padding must stay zero for the next norm
                for start, stop in gaps:
                    base[start:stop].zero_()

        # It is done right before the step on these gradients, or when they are read: else the first unit's step would wait
        # until all units are scaled.
        self._begin(self.host.thread.later(work), grads)


def _norms_of(pieces: Sequence[torch.Tensor], p: float, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return the norm of each piece of a gradient of `dtype`, in float64 if that is as wide, else in float32."""
    magnitudes = [piece.abs() if piece.is_complex() else piece for piece in pieces]
    wide = torch.float64 if dtype.to_real() is torch.float64 else torch.float32
    return list(torch._foreach_norm(magnitudes, p, dtype=wide))


def _note(base: torch.Tensor, norms: _Norms) -> None:
    base._norms = (base._version, norms)  # type: ignore[attr-defined]
