"""Orders the engine's host thread and the threads that give it work or wait for it."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

from torch_shard.offload.host_thread import HostThread, Task

from .clocks import Clock
from .streams import SimulatedStreams


@contextlib.contextmanager
def ordered_tasks(streams: SimulatedStreams) -> Iterator[None]:
    """Return a context in which a task comes behind what was before it was given, and before whoever waits for its end."""
    ends: weakref.WeakKeyDictionary[Any, Clock] = (
        weakref.WeakKeyDictionary()
    )  # by the flag that says that a task has ended
    put, run, wait, has_ended = HostThread.put, Task.run, Task.wait, Task.has_ended

    def put_ordered(self: HostThread, task: Task) -> None:
        before, do = dict(streams.host().clock), task._do

        def ordered() -> None:
            streams.host().join(before)
            assert do is not None
            do()

        if do is not None:
            task._do = ordered
        put(self, task)

    def run_ordered(self: Task) -> None:
        flag = self._done
        do = self._do

        def ends_ordered() -> None:
            assert do is not None
            try:
                do()
            finally:
                ends[flag] = dict(streams.host().clock)

        if do is not None:
            self._do = ends_ordered
        run(self)

    def wait_ordered(self: Task) -> None:
        wait(self)
        if streams.orders():
            streams.host().join(ends.get(self._done, {}))

    def has_ended_ordered(self: Task) -> bool:
        ended = has_ended(self)
        if ended and streams.orders():
            streams.host().join(ends.get(self._done, {}))
        return ended

    HostThread.put, Task.run = put_ordered, run_ordered  # type: ignore[method-assign]
    Task.wait, Task.has_ended = wait_ordered, has_ended_ordered  # type: ignore[method-assign]
    try:
        yield
    finally:
        HostThread.put, Task.run = put, run  # type: ignore[method-assign]
        Task.wait, Task.has_ended = wait, has_ended  # type: ignore[method-assign]
