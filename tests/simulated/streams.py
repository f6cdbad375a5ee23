"""The streams and events of a simulated device: they order agents, and nothing waits."""

from __future__ import annotations

import contextlib
import random
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, TypeAlias

import torch

import torch_shard
from torch_shard.comm.streams import Streams

from .clocks import Agent, Clock
from .sites import PASSED_ON, Site, site_at

CORE = str(Path(torch_shard.__file__).parent)
_LAYER = str(Path(CORE, "comm", "streams.py"))

Pace: TypeAlias = Literal["early", "late", "random"]
"""When events are seen to have passed: at once, as late as can be, or at random."""

_PATIENCE = 50  # queries after which an event has passed in any case: code may ask until it has


def site(depth: int = 2) -> str:
    """Return the place in the engine's code that calls the present function, or in the test's."""
    frame: Any = sys._getframe(depth)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(CORE) and name != _LAYER:
            return f"{name[len(CORE) + 1 :]}:{frame.f_lineno} {frame.f_code.co_name}"
        frame = frame.f_back
    return "the test"


def ordering(otherwise: str = "") -> list[Site]:
    """Return the calls of the engine that are ordering something now: the innermost, and those for which it does so.

    A call that is in none of the lists is left out, unless it is given a name by `otherwise`.
    """
    found: list[Site] = []
    frame: Any = sys._getframe(1)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(CORE) and name != _LAYER:
            file, function = Path(name[len(CORE) + 1 :]).as_posix(), frame.f_code.co_name
            place = site_at(file, frame.f_lineno)
            if place is None and otherwise and not found:
                place = Site(file, function, otherwise)
            if place is not None:
                found.append(place)
            if function not in PASSED_ON.get(file, ()):
                break
        frame = frame.f_back
    return found


class Event:
    """What was before a point of a stream."""

    def __init__(self, device: SimulatedStreams) -> None:
        self._device = device
        self._clock = Clock()
        self._asked = 0

    def record(self, stream: Any = None) -> None:
        """Move the event behind all that `stream`, by default the current one, was given so far."""
        device = self._device
        stream = device.current() if stream is None else stream
        stream.join(device.host().clock)
        self._clock, self._asked = dict(stream.clock), 0
        device.events += 1

    def wait(self, stream: Agent) -> None:
        stream.join(self._device.host().clock)
        self._device.stream_waits_for(stream, self._clock)

    def query(self) -> bool:
        """Return whether the event has passed: the device decides, unless the host knows already."""
        device, host = self._device, self._device.host()
        if all(host.clock.get(agent, 0) >= epoch for agent, epoch in self._clock.items()):
            return True
        self._asked += 1
        if not device.orders():  # nobody asks, and takes the event for passed
            return True
        passed = {"early": True, "late": False, "random": device.random.random() < 0.5}[device.pace]
        if not passed and self._asked > _PATIENCE:
            self._device.host_waits(site(), self._clock)  # who asks so often waits
            return True
        if passed:
            host.join(self._clock)
            return True
        return False

    def synchronize(self) -> None:
        """Make the host wait for the event."""
        self._device.host_waits(site(), self._clock)

    def elapsed_time(self, later: Event) -> float:
        return 0.0


class Stream(Agent):
    """A stream of the device."""

    def __init__(self, name: str, device: SimulatedStreams) -> None:
        super().__init__(name)
        self.device = device


class SimulatedStreams(Streams):
    """The streams of a simulated device.

    Attributes:
        waits: how often each place in the code has made the host wait for the device.
        stream_waits: how often a stream was made to wait for another one, an event or a collective.
        events: how often an event was recorded.
        sites: the calls of the engine that have ordered something, each with the number of times.
        dropped: calls that order nothing, as if they were not there.
        hosts: the agents of the host's threads so far.
        modes: makes the modes in which a thread's operations are seen.
    """

    exist = True

    def __init__(self, pace: Pace = "early", seed: int = 0, dropped: Iterable[Site] = ()) -> None:
        super().__init__(torch.device("cpu", 0))
        self.pace, self.random = pace, random.Random(seed)
        self.waits: dict[str, int] = {}
        self.stream_waits = self.events = 0
        self.sites: dict[Site, int] = {}
        self.dropped = set(dropped)
        self.modes: Callable[[], Iterable[Any]] = tuple
        self.hosts: list[Agent] = []
        self._threads = threading.local()
        self._made: list[Agent] = []
        self.default = self.add(Stream("the default stream", self))

    # -- who works ------------------------------------------------------------------------------------------------
    def host(self) -> Agent:
        """Return the agent of this thread."""
        found = getattr(self._threads, "host", None)
        if found is None:
            found = self._threads.host = Agent(f"host thread {threading.current_thread().name}")
            self.hosts.append(found)
        return found  # type: ignore[no-any-return]

    def current(self) -> Any:
        return getattr(self._threads, "stream", self.default)

    def set_current(self, stream: Any) -> None:
        """Make `stream` the current one of this thread."""
        self._threads.stream = stream

    def launch(self) -> tuple[Agent, int]:
        """Begin an operation on the current stream; return the stream and the operation's number."""
        stream = self.current()
        stream.join(self.host().clock)
        return stream, stream.tick()

    def host_waits(self, where: str, clock: Clock, named: str = "") -> None:
        """Make the host of this thread wait for what `clock` knows. `named`: what it waits in, if no call says so."""
        self.waits[where] = self.waits.get(where, 0) + 1
        if self.orders(named):
            self.host().join(clock)

    def stream_waits_for(self, stream: Agent, clock: Clock) -> None:
        """Make a stream wait for what `clock` knows."""
        self.stream_waits += 1
        stream.join(clock)

    def orders(self, named: str = "") -> bool:
        """Note which calls of the engine order something now; return False if one of them is dropped."""
        places = ordering(named)
        for place in places:
            self.sites[place] = self.sites.get(place, 0) + 1
        return self.dropped.isdisjoint(places)

    # -- the engine's layer ---------------------------------------------------------------------------------------
    def add(self, stream: Agent) -> Agent:
        """Make `stream` one of the device's, and return it."""
        self._made.append(stream)
        return stream

    def new(self, *, urgent: bool = False) -> Any:
        return self.add(Stream(f"stream {len(self._made)} of {site()}", self))

    @contextlib.contextmanager
    def use(self, stream: Any) -> Iterator[None]:
        before = self.current()
        self.set_current(stream)
        try:
            yield
        finally:
            self.set_current(before)

    def follow(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        self.join(stream, [self.current()])
        return self.use(stream)

    def join(self, stream: Any, others: Iterable[Any]) -> None:
        stream.join(self.host().clock)
        for other in others:
            if other is not stream and self.orders():
                other.join(self.host().clock)
                self.stream_waits_for(stream, other.clock)

    def record(self, stream: Any = None, *, event: Any = None, sleeps: bool = False) -> Any:
        event = Event(self) if event is None else event
        if self.orders():  # else it stays where it is; CUDA takes an event that was never recorded for passed
            event.record(stream)
        return event

    def wait(self, event: Any, stream: Any = None) -> None:
        if event is not None and self.orders():
            event.wait(self.current() if stream is None else stream)

    def memory_pool(self, allocator: Any) -> Any:
        return allocator

    @contextlib.contextmanager
    def allocate_from(self, pool: Any) -> Iterator[None]:
        before, self._threads.pool = self.pool(), pool
        try:
            yield
        finally:
            self._threads.pool = before

    def pool(self) -> Any:
        """Return the pool that this thread allocates from; None for the usual one."""
        return getattr(self._threads, "pool", None)

    def timing_event(self) -> Any:
        return Event(self)

    def synchronize(self) -> None:
        where = site()
        for stream in self._made:
            self.host_waits(where, stream.clock)

    def finish(self) -> None:
        self.host_waits(site(), self.current().clock)

    def enter_thread(self) -> None:
        for mode in self.modes():
            mode.__enter__()  # for as long as the thread lives
        self.set_current(self.new())
