"""A gradient reduction in flight: waiting for it, and this rank's shard of the sum."""

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


@dataclass(eq=False)
class Reduction:
    """A gradient reduction in flight, whose ``finish`` returns this rank's shard of the sum."""

    collectives: Collectives
    grad: torch.Tensor
    received: torch.Tensor
    pending: Pending
    begun: Any = None  # CUDA: an event recorded when this rank's own gradients are ready
    streams: Sequence[Any] = ()  # CUDA: the streams that wrote to `grad`
    inter_replica: str = ""  # the name of the inter-replica all-reduce that is still to be begun; "" if there is none
    total: torch.Tensor | None = None  # this rank's shard of the sum, once it has been computed
    inter_replica_dtype: torch.dtype | None = None  # the dtype of the inter-replica all-reduce; None for that of `grad`

    def queue_inter_replica(self, what: str) -> None:
        """Queue the inter-replica all-reduce of this reduction's sum, to begin once the sum is complete and its turn has come."""
        self.inter_replica = what
        self.collectives.waiting.append(self)

    def done(self) -> bool:
        """Return True if the reduction is complete; begin queued inter-replica all-reduces whose turn has come."""
        return self.wait_at_most(0.0)

    def wait_at_most(self, seconds: float) -> bool:
        """Wait for about `seconds` at most; return False if the reduction is still running."""
        while self.inter_replica:
            first = self.collectives.waiting[0]
            if not first.pending.wait_at_most(seconds):
                return False
            first.begin_inter_replica()
        return self.pending.wait_at_most(seconds)

    def begin_inter_replica(self) -> None:
        """Wait for the sum within this rank's replica, and begin the inter-replica all-reduce.

        Only the oldest of the waiting reductions may be passed on, so that the ranks of all replicas issue the all-reduces in
        one order, whichever sums are complete on each rank.
        """
        c, what = self.collectives, self.inter_replica
        assert c.waiting[0] is self
        self.pending.wait()
        c.waiting.popleft()
        self.inter_replica = ""
        self.total = self._own_sum(self.inter_replica_dtype or self.grad.dtype)
        assert c.replica_channel is not None
        self.pending = c.all_reduce(c.replica_channel, self.total, what)

    def _own_sum(self, dtype: torch.dtype, narrow: bool = False) -> torch.Tensor:
        """Return this rank's shard of the complete sum within its replica, and give the buffers back."""
        c = self.collectives
        if c.backend == "gloo" and self.received is not self.grad:
            out = _sum(self.received.view(c.size, -1), dtype)
            c.give(self.grad)
            c.give(self.received)
            return out
        out = cast(self.received, dtype, narrow)
        if out is not self.grad:  # else an all-reduce ran in place, and the buffer is the result
            c.give(self.grad)
        return out

    def abandon(self, seconds: float) -> None:
        """Drop the reduction after a failed backward. A partner may never come, so this waits for about `seconds` at most."""
        try:
            self.wait_at_most(seconds)
        finally:
            if self.inter_replica:  # the ranks of other replicas may have begun the all-reduce
                c = self.collectives
                c.waiting.remove(self)
                text = f"rank {c.world_rank} has left {self.inter_replica}, when a backward failed."
                c.reduce_channel.groups.abort(c.world_rank, ShardError(text))  # type: ignore[union-attr]

    def wait_for_own_part(self) -> None:
        """Block the host until this rank's device has reached the reduction. From then on only the partners are waited for."""
        if self.begun is None:
            return
        deadline = time.monotonic() + self.collectives.watchdog.timeout
        while not self.begun.query() and time.monotonic() < deadline:
            time.sleep(POLL)

    def finish(self, dtype: torch.dtype, narrow: bool = False) -> torch.Tensor:
        """Wait, and return this rank's shard of the sum in `dtype`. With `narrow`, keep the sum's dtype if that is narrower."""
        c = self.collectives
        here = c.streams.current()
        for stream in self.streams:
            # Hazard: the buffer's memory returns to the pool of the stream on which it was allocated. That stream may not be the
            # current one, and must not reuse the memory before the collective has read it.
            if stream != here:
                c.streams.wait(self.pending.event, stream)
        while self.inter_replica:
            c.waiting[0].begin_inter_replica()
        self.pending.wait()
        return self._own_sum(dtype, narrow) if self.total is None else cast(self.total, dtype, narrow)


def cast(tensor: torch.Tensor, dtype: torch.dtype, narrow: bool) -> torch.Tensor:
    """Return `tensor` in `dtype`. With `narrow`, return it unchanged if `dtype` is wider: the caller widens it later, exactly."""
    # Most often there is nothing to do, and `to` would take a microsecond to find out.
    if tensor.dtype is dtype or (narrow and widens(tensor.dtype, dtype)):
        return tensor
    return tensor.to(dtype)


def _sum(chunks: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the sum of the rows in `dtype`, rounded once: it is computed in the wider of the two dtypes."""
    if widens(chunks.dtype, dtype):
        out = chunks[0].to(dtype)
        for chunk in chunks[1:]:
            out += chunk
        return out
    return (torch.add(chunks[0], chunks[1]) if len(chunks) == 2 else chunks.sum(dim=0)).to(dtype)
