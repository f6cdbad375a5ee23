"""What an engine has sent, how long training waited for it, and what is gathered: counted where it happens.

Waiting over Gloo is timed always: two looks at a clock for each collective that somebody waits for. On GPUs it is the stream
that waits, not the thread, so that it takes events to know for how long; those are recorded on request.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .collectives import Collectives
    from .work import Channel

__all__ = ["GatheredBytes", "Statistics", "StreamWaits", "waits"]

_GATHERS = frozenset(("gather", "gather again"))
_REDUCTIONS = frozenset(("reduce", "reduce slices", "across", "lane"))


@dataclass(frozen=True)
class Statistics:
    """Figures of one rank: counters since set-up, and what is gathered now.

    Attributes:
        bytes_sent: that this rank has sent for parameters and gradients.
        bytes_sent_across: of these, between copies of the parameters, under the hybrid strategies and ``no_shard``.
        gather_wait: seconds that training has waited for gathers of parameters.
        reduce_wait: seconds that it has waited for reductions of gradients, and for what optimizers of whole matrices exchange.
        other_wait: seconds that it has waited for the other ranks in small messages: where a forward begins and where a
            backward ends, in norms, buffers and saves. A rank that comes earlier than the others waits here; how fast the
            network is says little about it.
        gathered: bytes of gathered parameters that this rank holds now.
        peak_gathered: the most of those at any moment since set-up, or since :meth:`Engine.reset_peak_gathered`.
        host_wait: seconds that training has waited for the host to step on offloaded parameters, and for copies to and from it.
    """

    bytes_sent: int
    bytes_sent_across: int
    gather_wait: float
    reduce_wait: float
    other_wait: float
    gathered: int
    peak_gathered: int
    host_wait: float = 0.0

    def since(self, earlier: Statistics) -> Statistics:
        """What was counted since `earlier`, figures of the same engine; `gathered` and `peak_gathered` stay as they are."""
        counted = ("bytes_sent", "bytes_sent_across", "gather_wait", "reduce_wait", "other_wait", "host_wait")
        return dataclasses.replace(self, **{name: getattr(self, name) - getattr(earlier, name) for name in counted})


class GatheredBytes:
    """How much memory one model's gathered parameters take, and took at most."""

    def __init__(self) -> None:
        self.now = self.peak = 0

    def add(self, nbytes: int) -> None:
        self.now += nbytes
        if self.now > self.peak:
            self.peak = self.now


class StreamWaits:
    """How long streams stood still for collectives.

    An event before a wait passes when the stream has done what it was given earlier, one behind the wait when the collective
    has ended, too. The time between them is the waiting. It is read once both have passed, so that nobody waits for the device.
    """

    def __init__(self, device: torch.device, event: Callable[[], Any] | None = None) -> None:
        self._device = device
        self._event = event or (lambda: torch.cuda.Event(enable_timing=True))
        self._under_way: deque[tuple[Channel, Any, Any]] = deque()
        self._free: list[Any] = []

    def begin(self) -> Any:
        """Before the current stream waits; None where its work is only being recorded (a CUDA graph)."""
        if torch.cuda.is_current_stream_capturing():
            return None
        return self._recorded()

    def end(self, channel: Channel, begun: Any) -> None:
        """Behind that wait."""
        if begun is not None:
            self._under_way.append((channel, begun, self._recorded()))
            self.collect(at_most=2)  # as many as were added, and one more: what has passed never piles up

    def _recorded(self) -> Any:
        event = self._free.pop() if self._free else self._event()
        event.record(torch.cuda.current_stream(self._device))
        return event

    def collect(self, at_most: int | None = None) -> None:
        """Add what has passed to the channels' waiting."""
        while self._under_way and self._under_way[0][2].query() and at_most != 0:
            channel, begun, ended = self._under_way.popleft()
            channel.waited += begun.elapsed_time(ended) / 1e3
            self._free += (begun, ended)
            at_most = None if at_most is None else at_most - 1


def waits(collectives: Collectives) -> tuple[float, float, float]:
    """Seconds waited for gathers, for reductions and for everything else."""
    watch = collectives.watch
    if watch.stream_waits is not None:
        watch.stream_waits.collect()
    gathers = reductions = others = 0.0
    for channel in watch.channels.values():
        if channel.purpose in _GATHERS:
            gathers += channel.waited
        elif channel.purpose in _REDUCTIONS:
            reductions += channel.waited
        else:
            others += channel.waited
    return gathers, reductions, others
