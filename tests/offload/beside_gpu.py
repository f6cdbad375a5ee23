"""What a model's host does beside a GPU, run without one: copies are made at once, and the events behind them pass when the test
says so."""

from __future__ import annotations

import contextlib
import threading
import weakref

import torch


class Stream:
    def __init__(self):
        self.waited = []

    def wait_event(self, event):
        self.waited.append(event)

    def wait_stream(self, stream):
        pass


class Device:
    """Attributes:
    stream: the current one.
    left: for each copy of gradients to the host its event, a weak reference to the device memory, and the unit's number.
    """

    def __init__(self, holds):
        self.stream = Stream()
        self.left = []
        self._go = threading.Event()
        if not holds:
            self._go.set()

    def pass_events(self):
        self._go.set()

    def event(self, **options):
        return Event(self._go)

    def waits_for(self, event):
        return any(event is other for other in self.stream.waited)


class Event:
    def __init__(self, go):
        self._go = go

    def record(self, stream=None):
        pass

    def query(self):
        return self._go.is_set()

    def synchronize(self):
        assert self._go.wait(20), "somebody waits for a copy"


@contextlib.contextmanager
def beside_gpu(host, gradients=(), holds=False):
    """Have `host` and its `gradients`, gradient buffers, take the CPU for a GPU. With `holds` no copy has ended until
    ``pass_events``."""
    device = Device(holds)
    keep = host.keep

    def kept(event, values, unit, flat, streams):
        device.left.append((event, weakref.ref(values), unit))
        keep(event, values, unit, flat, streams)

    before = torch.cuda.Event, torch.cuda.current_stream
    torch.cuda.Event, torch.cuda.current_stream = device.event, lambda *_: device.stream
    host.on_cuda, host.leaving, host.keep = True, contextlib.nullcontext, kept
    for each in gradients:
        each._notes_streams = True
    try:
        yield device
    finally:
        device.pass_events()
        host.thread.rest()
        host.forget_arrived()
        host.on_cuda = False
        del host.leaving, host.keep
        for each in gradients:
            each._notes_streams = False
        torch.cuda.Event, torch.cuda.current_stream = before
