"""What a model's host does beside a GPU, run without one: copies are made at once, and the events behind them pass when the test
says so."""

from __future__ import annotations

import contextlib
import threading
import weakref

import torch

from torch_shard.comm.streams import Streams


class Device(Streams):
    """A device with one stream.

    Attributes:
        waited: the events for which the stream waits.
        left: for each copy of gradients to the host its event, a weak reference to the device memory, and the unit's number.
    """

    exist = True

    def __init__(self, holds):
        super().__init__(torch.device("cpu"))
        self.waited, self.left = [], []
        self._go = threading.Event()
        if not holds:
            self._go.set()

    def pass_events(self):
        self._go.set()

    def current(self):
        return "the only one"

    def record(self, stream=None, *, event=None, sleeps=False):
        return Event(self._go)

    def wait(self, event, stream=None):
        self.waited.append(event)

    def waits_for(self, event):
        return any(event is other for other in self.waited)


class Event:
    def __init__(self, go):
        self._go = go

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

    c, before = host.collectives, host.streams
    host.streams, c.streams, host.keep = device, device, kept
    for each in gradients:
        each._notes_streams = True
    try:
        yield device
    finally:
        device.pass_events()
        host.thread.rest()
        host.forget_arrived()
        host.streams = c.streams = before
        del host.keep
        for each in gradients:
            each._notes_streams = False
