"""Streams and events: what orders the work on a device. The only place that asks torch for them.

A device works while the host goes on, and each of its streams while the others go on. So whoever reads or frees memory that
another stream writes or reads has to wait for that stream. On the CPU a call returns when its work has ended: there are no
streams, every event is None, and to wait for one is to do nothing. No other code asks what kind of device it has.

The streams of CUDA and ROCm devices come from ``torch.cuda``. Those of other accelerators come from the module that torch names
for them (``torch.get_device_module``), which has the same functions; no such device was tried.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch

_NO_CONTEXT = contextlib.nullcontext()
_WITHOUT = ("cpu", "meta", "mps")  # types of devices without streams of their own; Metal has no collectives either


def orders_streams(backend: str) -> bool:
    """Return True if a backend's collectives run on the device's streams.

    To wait for one makes the current stream wait, and the host goes on. Gloo's collectives make the host wait.
    """
    return backend in ("nccl", "xccl", "hccl", "cncl")


def like_nccl(backend: str) -> bool:
    """Return True if a backend's reductions can divide by the number of ranks, and its gathers can fill several buffers."""
    return backend in ("nccl", "xccl")


def accelerator() -> str:
    """Return the type of this machine's accelerators, "" if it has none. This does not initialise them."""
    found = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
    return "" if found is None or found.type in _WITHOUT else found.type


def indexed(device: torch.device) -> torch.device:
    """Return an accelerator with its index, which is by default that of the current one."""
    return device if device.index is not None else torch.device(device.type, torch.accelerator.current_device_index())


class Streams:
    """The streams of one device. This class is that of the CPU, which has none.

    Attributes:
        device: the device.
        exist: True if the device works while the host goes on.
    """

    exist = False

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def current(self) -> Any:
        """Return the stream to which this thread gives work now."""
        return None

    def new(self, *, urgent: bool = False) -> Any:
        """Return a stream, one of high priority if it is `urgent`."""
        return None

    def use(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which this thread gives its work to `stream`."""
        return _NO_CONTEXT

    def follow(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        """Make `stream` wait for the current stream's work so far, and return a context in which work is given to `stream`.

        The context must be entered at once, and only once.
        """
        return _NO_CONTEXT

    def join(self, stream: Any, others: Iterable[Any]) -> None:
        """Make `stream` wait for the work that the other streams have been given so far."""

    def record(self, stream: Any = None, *, event: Any = None, sleeps: bool = False) -> Any:
        """Return an event that passes when `stream`, by default the current one, has done the work it was given so far.

        Args:
            stream: the stream.
            event: an event to record anew, in place of a new one.
            sleeps: the host sleeps while it waits for the event, and leaves its core to others.
        """
        return None

    def wait(self, event: Any, stream: Any = None) -> None:
        """Make `stream`, by default the current one, wait for an event. With None there is nothing to wait for."""

    def timing_event(self) -> Any:
        """Return an event, not recorded yet, between which and another one the time can be read."""
        return None

    def memory_pool(self, allocator: Any) -> Any:
        """Return a new pool of the device's caching allocator, which takes its memory from `allocator`."""
        return None

    def allocate_from(self, pool: Any) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which this thread allocates memory of this device from `pool`."""
        return _NO_CONTEXT

    def is_capturing(self) -> bool:
        """Return True if the current stream is being captured into a graph."""
        return False

    def synchronize(self) -> None:
        """Make the host wait for all work of the device."""

    def finish(self) -> None:
        """Make the host wait for the work that the current stream has been given so far."""

    def on_device(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which this device is the current one."""
        return _NO_CONTEXT

    def enter_thread(self) -> None:
        """Make this device the current one of this thread, which gives its work to a stream of its own."""

    def device_name(self) -> str | None:
        """Return what the maker calls the device; None if it is the host itself."""
        return None

    def total_memory(self) -> int | None:
        """Return the bytes of the device's own memory; None if it has none beside the host's."""
        return None

    def allocated_memory(self) -> int | None:
        """Return the bytes of the device's own memory that tensors hold now; None if it has none beside the host's."""
        return None

    def random_state(self) -> torch.Tensor | None:
        """Return the state of the device's random generator; None if it has none beside the CPU's."""
        return None

    def set_random_state(self, state: torch.Tensor) -> None:
        """Set the state of the device's random generator."""


class DeviceStreams(Streams):
    """The streams of an accelerator."""

    exist = True

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._torch: Any = torch.get_device_module(device)
        self._is_capturing = getattr(self._torch, "is_current_stream_capturing", lambda: False)

    def current(self) -> Any:
        return self._torch.current_stream(self.device)

    def new(self, *, urgent: bool = False) -> Any:
        return self._torch.Stream(self.device, priority=-1 if urgent else 0)

    def use(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        return self._torch.stream(stream)  # type: ignore[no-any-return]

    def follow(self, stream: Any) -> contextlib.AbstractContextManager[Any]:
        stream.wait_stream(self.current())
        return self.use(stream)

    def join(self, stream: Any, others: Iterable[Any]) -> None:
        for other in others:
            if other != stream:
                stream.wait_stream(other)

    def record(self, stream: Any = None, *, event: Any = None, sleeps: bool = False) -> Any:
        if event is None:
            # The events of other accelerators have no such option.
            event = self._torch.Event(blocking=True) if sleeps and self.device.type == "cuda" else self._torch.Event()
        event.record(self.current() if stream is None else stream)
        return event

    def wait(self, event: Any, stream: Any = None) -> None:
        if event is not None:
            (self.current() if stream is None else stream).wait_event(event)

    def timing_event(self) -> Any:
        return self._torch.Event(enable_timing=True)

    def memory_pool(self, allocator: Any) -> Any:
        return self._torch.MemPool(allocator)

    def allocate_from(self, pool: Any) -> contextlib.AbstractContextManager[Any]:
        return self._torch.use_mem_pool(pool, self.device)  # type: ignore[no-any-return]

    def is_capturing(self) -> bool:
        with self.on_device():
            return bool(self._is_capturing())

    def synchronize(self) -> None:
        self._torch.synchronize(self.device)

    def finish(self) -> None:
        self.current().synchronize()

    def on_device(self) -> contextlib.AbstractContextManager[Any]:
        return self._torch.device(self.device)  # type: ignore[no-any-return]

    def enter_thread(self) -> None:
        self._torch.set_device(self.device)
        self._torch.set_stream(self.new())

    def device_name(self) -> str | None:
        return str(self._torch.get_device_properties(self.device).name)

    def total_memory(self) -> int | None:
        return int(self._torch.get_device_properties(self.device).total_memory)

    def allocated_memory(self) -> int | None:
        return int(self._torch.memory_allocated(self.device))

    def random_state(self) -> torch.Tensor | None:
        return self._torch.get_rng_state(self.device)  # type: ignore[no-any-return]

    def set_random_state(self, state: torch.Tensor) -> None:
        self._torch.set_rng_state(state, self.device)


# By device. They hold nothing of a model; tests put simulated streams here.
_kept: dict[torch.device, Streams] = {}


def streams_of(device: torch.device) -> Streams:
    """Return the streams of a device, the same object at each call."""
    found = _kept.get(device)
    if found is None:
        kind = Streams if device.type in _WITHOUT else DeviceStreams
        found = _kept[device] = kind(device)
    return found


def on_device(device: torch.device | None) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which `device` is the current one; None leaves that as it is."""
    return _NO_CONTEXT if device is None else streams_of(device).on_device()


def current_streams() -> Streams:
    """Return the streams of the current accelerator if this process has used one, else those of the CPU."""
    kind = accelerator()
    used = kind and torch.get_device_module(kind).is_initialized()
    return streams_of(indexed(torch.device(kind)) if used else torch.device("cpu"))
