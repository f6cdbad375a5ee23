"""One flat buffer's reduced gradients on their way to host memory, and what becomes of them there."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from .host import Host, Spares
from .moving import Moving, Work

__all__ = ["PIECE", "HostGradients"]

PIECE = 1 << 16
"""Elements of which norms are taken at once in host memory: torch adds in fp32 one after the other there."""
_CHUNK = 1 << 20  # elements that are added, and whose norms are taken while they are in cache


class HostGradients:
    """`numel`: of the shard.

    Attributes:
        moving: the work on them. That on the shard is another: a forward need not wait for gradients.
    """

    def __init__(self, host: Host, numel: int) -> None:
        self.host, self.moving = host, Moving(host.waits)
        self._spares = Spares(host, numel)
        self._only_arriving = False  # the latest work: there is nothing that the host does

    def prepare(self, dtype: torch.dtype) -> None:
        """Take memory for gradients of this dtype.

        Raises:
            HostMemoryError: there is none.
        """
        self._spares.prepare(dtype)

    def receive(self, result: torch.Tensor) -> torch.Tensor:
        """`result`, 1-D, on the device and nobody else's any more, on its way to host memory: that memory. Sharded tensors that
        are made over it have to wait (``moving.hold``)."""
        self.moving.tidy()  # what a step has read may be used again
        into = self._spares.take(result.dtype)
        into._home = self.moving  # type: ignore[attr-defined]
        if self.host.on_cuda:
            found = {p: list(torch._foreach_norm([result], p, dtype=_wide(result))) for p in self.host.norms}
            self._begin(self._leave(result, into))
            _note(into, found)
        else:
            self._begin(self.host.thread.do(lambda: self._write(into, result, torch.Tensor.copy_)))
        return into

    def add(self, base: torch.Tensor, result: torch.Tensor, shown: Iterable[Any]) -> None:
        """Add it to `base`, in host memory, over which `shown` are sharded tensors."""
        arrived, arrival = result, None
        if self.host.on_cuda:
            arrived = self._spares.take(result.dtype)
            arrival = self._leave(result, arrived)

        def work() -> None:
            if arrival is not None:
                arrival.wait()
            self._write(base, arrived, torch.Tensor.add_)

        self.moving.hurry()
        self._begin(self.host.thread.do(work), shown)

    def _begin(self, work: Work, tensors: Iterable[Any] = ()) -> None:
        self._only_arriving = isinstance(work, _Arrival)
        self.moving.begin(work, tensors)

    def _leave(self, result: torch.Tensor, into: torch.Tensor) -> _Arrival:
        """From a GPU."""
        with self.host.leaving():
            into.copy_(result, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self.host.keep(event, result)
        return _Arrival(event)

    def _write(self, into: torch.Tensor, arrived: torch.Tensor, write: Callable[[Any, Any], Any]) -> None:
        """Norms are taken of what was written last, chunk by chunk."""
        found: dict[float, list[torch.Tensor]] = {p: [] for p in self.host.norms}
        if not found:
            write(into, arrived)
        else:
            length = PIECE if into.numel() > 2 * PIECE else max(1, into.numel())
            for own, new in zip(into.split(_CHUNK), arrived.split(_CHUNK), strict=True):
                write(own, new)
                for p, norms in found.items():
                    norms += torch._foreach_norm(list(own.split(length)), p, dtype=_wide(own))
        _note(into, found)

    # -- for clipping ---------------------------------------------------------------------------------------------
    def norms(self, base: torch.Tensor, p: float) -> list[torch.Tensor] | None:
        """Those of the pieces of `base`, in which all gradients lie, if they were taken on the way and nothing was changed since.
        Waits for no copy from a GPU, but for what the host does."""
        self.host.norms.add(p)  # next time they are there
        if not self._only_arriving:
            self.moving.settle()
        noted = None if self.moving.exposed else getattr(base, "_norms", None)  # else no version shows an edit
        return noted[1].get(p) if noted is not None and noted[0] == base._version else None

    def scale(
        self, base: torch.Tensor, factor: torch.Tensor, gaps: Sequence[tuple[int, int]], shown: Iterable[Any]
    ) -> None:
        """Multiply `base` by a 0-d factor, which may still be on its way. `gaps`: its padding; `shown`: the tensors over it."""

        event = None
        if self.host.on_cuda:
            # Hazards: the norms were taken before the gradients are here, so these may still arrive when the factor is known; and
            # the stream that computes the factor is not the host thread's.
            with self.host.leaving():
                factor = factor.to("cpu", non_blocking=True)
                event = torch.cuda.Event()
                event.record()

        def work() -> None:
            if event is not None:
                event.synchronize()
            known = factor
            if known == 1.0:
                return
            base.mul_(known)
            if known.isnan():  # zero times NaN: the padding must stay zero for the next norm
                for start, stop in gaps:
                    base[start:stop].zero_()

        # Right before the step on these, or when somebody reads them: else the first unit's step would wait for all of it.
        self._begin(self.host.thread.later(work), shown)


class _Arrival:
    """A copy to host memory."""

    def __init__(self, event: Any) -> None:
        self._event = event

    @property
    def writes(self) -> bool:
        return True

    def has_ended(self) -> bool:
        ended: bool = self._event.query()
        return ended

    def wait(self) -> None:
        self._event.synchronize()


def _wide(tensor: torch.Tensor) -> torch.dtype:
    """In which its norm is taken."""
    return torch.float64 if tensor.dtype is torch.float64 else torch.float32


def _note(base: torch.Tensor, norms: dict[float, list[torch.Tensor]]) -> None:
    base._norms = (base._version, norms)  # type: ignore[attr-defined]
