"""Statistics of one engine: bytes sent, time waited for collectives, and memory of gathered parameters.

Over Gloo each wait is timed by two readings of a clock. On GPUs the stream waits, not the thread, so that events are needed to
time a wait. They are recorded on request only.
"""

from __future__ import annotations

import dataclasses
from collections import Counter, deque
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .collectives import Collectives
    from .streams import Streams
    from .work import Channel


@dataclass(frozen=True)
class Statistics:
    """Figures of one rank: counters since set-up, and the memory of parameters that are gathered now.

    Attributes:
        bytes_sent: bytes that this rank has sent for parameters and gradients.
        bytes_sent_across: the part of `bytes_sent` between replicas, under hybrid strategies and ``no_shard``.
        gather_wait: seconds that training has waited for gathers of parameters.
        reduce_wait: seconds that it has waited for reductions of gradients, and for what optimizers of full matrices exchange.
        other_wait: seconds that it has waited for the other ranks in small messages: where a forward begins and where a
            backward ends, in norms, buffers and saves. A rank that comes earlier than the others waits here; how fast the
            network is says little about it.
        gathered: bytes of gathered parameters that this rank holds now.
        peak_gathered: the most of those at any moment since set-up, or since :meth:`Engine.reset_peak_gathered`.
        lone_reads: how often this rank has read the model alone, while the other ranks were elsewhere.
        lone_bytes: bytes that those reads have brought from other ranks.
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
    lone_reads: int = 0
    lone_bytes: int = 0

    def since(self, earlier: Statistics) -> Statistics:
        """Return the counts since `earlier`, statistics of the same engine; `gathered` and `peak_gathered` are unchanged."""
        counted = [field.name for field in dataclasses.fields(self) if field.name not in ("gathered", "peak_gathered")]
        return dataclasses.replace(self, **{name: getattr(self, name) - getattr(earlier, name) for name in counted})


class GatheredBytes:
    """The bytes of one model's gathered parameters, now and at their peak."""

    def __init__(self) -> None:
        self.now = self.peak = 0

    def add(self, nbytes: int) -> None:
        self.now += nbytes
        if self.now > self.peak:
            self.peak = self.now


class StreamWaits:
    """The time that streams have waited for collectives.

    An event before a wait passes when the stream has done its earlier work. An event after the wait passes when the collective
    has ended, too. The time between the events is the time waited. It is read once both have passed, so that the host never
    waits for the device.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._under_way: deque[tuple[Channel, Any, Any]] = deque()
        self._free: list[Any] = []

    def begin(self) -> Any:
        """Record and return an event before a wait of the current stream; None while a CUDA graph is being captured."""
        if self._streams.is_capturing():
            return None
        return self._recorded()

    def end(self, channel: Channel, begun: Any) -> None:
        """Record an event after the wait, whose first event is `begun`."""
        if begun is not None:
            self._under_way.append((channel, begun, self._recorded()))
            self.collect(at_most=2)  # one wait was added; two are collected, so that ended ones never pile up

    def _recorded(self) -> Any:
        return self._streams.record(event=self._free.pop() if self._free else self._streams.timing_event())

    def collect(self, at_most: int | None = None) -> None:
        """Add the waits that have ended, at most `at_most`, to the channels' times."""
        while self._under_way and self._under_way[0][2].query() and at_most != 0:
            channel, begun, ended = self._under_way.popleft()
            channel.waited += begun.elapsed_time(ended) / 1e3
            self._free += (begun, ended)
            at_most = None if at_most is None else at_most - 1


def waits(collectives: Collectives) -> tuple[float, float, float]:
    """Return the seconds waited for gathers, for reductions and for all other collectives."""
    watchdog = collectives.watchdog
    if watchdog.stream_waits is not None:
        watchdog.stream_waits.collect()
    by_purpose: Counter[str] = Counter()
    for channel in watchdog.channels.values():
        by_purpose[channel.purpose] += channel.waited  # type: ignore[assignment]
    gathers, reductions = by_purpose.pop("all-gather", 0.0), by_purpose.pop("reduce", 0.0)
    return gathers, reductions, sum(by_purpose.values())
