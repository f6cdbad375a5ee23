"""A gradient reduction in flight: waiting for it, and what this rank gets of the sum."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..errors import ShardError
from ..numerics.dtypes import widens
from .work import POLL, Pending

if TYPE_CHECKING:
    from .collectives import Collectives

__all__ = ["IN_FLIGHT", "IN_FLIGHT_ON_STREAMS", "Reduction", "cast"]

# Reductions in flight: each holds its unit's gradients and, over Gloo, what is received, which is as large. Above this many,
# backward pauses for the oldest, but not for long: a rank that leaves a parameter unused issues its reductions at the end of
# backward only, and until then it may need a gather from this one. On a GPU one more, else its queue would run empty while the
# host waits.
IN_FLIGHT, IN_FLIGHT_ON_STREAMS = 1, 2


@dataclass(eq=False)
class Reduction:
    """A gradient reduction in flight; ``finish`` returns this rank's slice of the sum."""

    collectives: Collectives
    grad: torch.Tensor
    received: torch.Tensor
    pending: Pending
    begun: Any = None  # CUDA: recorded where this rank's own gradients are ready
    streams: Sequence[Any] = ()  # CUDA: those that wrote to `grad`
    across: str = ""  # what the all-reduce between copies is called, which is to follow
    total: torch.Tensor | None = None  # this rank's slice of the sum, where it has been made

    def send_across(self, what: str) -> None:
        """Its sum is to be summed with those of the other copies, when it is there and its turn has come."""
        self.across = what
        self.collectives.waiting.append(self)

    def done(self) -> bool:
        return self.settle(0.0)

    def settle(self, seconds: float) -> bool:
        """Wait at most about this long; False if it is still going on."""
        while self.across:
            first = self.collectives.waiting[0]
            if not first._ended(seconds):
                return False
            first.go_across()
        return self._ended(seconds)

    def _ended(self, seconds: float) -> bool:
        return self.pending.done() or (seconds > 0.0 and self.pending.settle(seconds))

    def go_across(self) -> None:
        """Wait for the first part, and begin the second. For the oldest of those that wait for that, so that all copies' ranks
        come here in one order, whatever has ended where."""
        c, what = self.collectives, self.across
        assert c.waiting[0] is self
        self.pending.wait()
        c.waiting.popleft()
        self.across = ""
        self.total = self._own_sum(self._dtype_across())
        self.pending = c._all_reduce_across(self.total, what)

    def _dtype_across(self) -> torch.dtype:
        return self.grad.dtype

    def _own_sum(self, dtype: torch.dtype, narrow: bool = False) -> torch.Tensor:
        """The first part has ended: this rank's slice. Gives the buffers back."""
        c = self.collectives
        if c.backend == "gloo" and self.received is not self.grad:
            out = _sum(self.received.view(c.size, -1), dtype)
            c.give(self.grad)
            c.give(self.received)
            return out
        out = cast(self.received, dtype, narrow)
        if out is not self.received:
            c.give(self.grad)
            return out
        if self.received is not self.grad:  # else an all-reduce in place: the buffer itself is the result
            c.give(self.grad)
        return self.received

    def abandon(self, seconds: float) -> None:
        """A partner may never come: don't wait for long."""
        try:
            self.settle(seconds)
        finally:
            if self.across:  # the other copies may have gone on
                c = self.collectives
                c.waiting.remove(self)
                text = f"rank {c.world_rank} has left {self.across}, when a backward failed."
                c.reduce_channel.groups.give_up(c.world_rank, ShardError(text))  # type: ignore[union-attr]

    def wait_for_own_part(self) -> None:
        """Have the host wait until this rank's device has come to the reduction. What then remains is the partners' time."""
        if self.begun is None:
            return
        deadline = time.monotonic() + self.collectives.watch.timeout
        while not self.begun.query() and time.monotonic() < deadline:
            time.sleep(POLL)

    def finish(self, dtype: torch.dtype, narrow: bool = False) -> torch.Tensor:
        """This rank's slice of the sum, in `dtype`; with `narrow` in that of the sum, if that is narrower."""
        c = self.collectives
        for stream in self.streams:
            # Hazard: the buffer's memory goes back to the stream that it was made on, which may not be the one that
            # publishes, and must not be used there again before the collective has read it.
            stream.wait_event(self.pending.event)
        while self.across:
            c.waiting[0].go_across()
        self.pending.wait()
        return self._own_sum(dtype, narrow) if self.total is None else cast(self.total, dtype, narrow)


def cast(tensor: torch.Tensor, dtype: torch.dtype, narrow: bool) -> torch.Tensor:
    """`tensor` in `dtype`; with `narrow` only if that makes it no wider, since others will do it elsewhere, and exactly."""
    # Most often there is nothing to do, which `to` would need a microsecond for.
    if tensor.dtype is dtype or (narrow and widens(tensor.dtype, dtype)):
        return tensor
    return tensor.to(dtype)


def _sum(chunks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The sum of the rows in `dtype`, rounded once."""
    if chunks.dtype == dtype:
        return torch.add(chunks[0], chunks[1]) if len(chunks) == 2 else chunks.sum(dim=0)
    out = chunks[0].to(dtype)
    for chunk in chunks[1:]:
        out += chunk
    return out
