"""The storages that are alive while a step is recorded, and what is known of them.

Storages are followed by weak references, so that one ends when autograd and the program have let go of it, as memory does in a
real step.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
from torch._subclasses.fake_tensor import FakeTensor

from .step_trace import Event, Free, Kind, Phase


@dataclass(eq=False)
class Storage:
    """One storage, as far as it is known by now."""

    number: int
    nbytes: int
    device: str
    segment: int  # index of that in which it was allocated
    kind: Kind | None = None
    name: str = ""
    died: int | None = None  # index of the event of its end
    watch: weakref.ref[torch.UntypedStorage] | None = None


@dataclass(eq=False)
class Segment:
    """A stretch of one phase that is all recomputation or all not."""

    phase: Phase
    recompute: bool
    end: int | None = None  # index of the first event after it


class Storages:
    """The storages of a step. Those that come and go are added to its events.

    Attributes:
        placing_on: the type of the device for all that is allocated now, inside of :meth:`placing`.
    """

    def __init__(self, events: list[Event | Storage], segments: Sequence[Segment], device: str) -> None:
        """Begin without storages.

        Args:
            events: the list to which a storage itself is added in place of its allocation, and the events of its end.
            segments: the segments of the step so far.
            device: the type of the device on which the model is.
        """
        self._events = events
        self._segments = segments
        self._device = device
        self._alive: dict[int, Storage] = {}  # by address
        self._count = 0
        self.placing_on: str | None = None

    def place_of(self, tensor: torch.Tensor) -> str:
        """Return the type of the device on which a tensor is meant to be."""
        known = self._alive.get(tensor.untyped_storage()._cdata) if isinstance(tensor, FakeTensor) else None
        return tensor.device.type if known is None else known.device

    @contextmanager
    def placing(self, place: str) -> Iterator[None]:
        """Put what is allocated in the meantime on this type of device."""
        before, self.placing_on = self.placing_on, place
        try:
            yield
        finally:
            self.placing_on = before

    def of(self, tensor: torch.Tensor, place: str | None = None) -> Storage:
        """Return what is known of a tensor's storage; a new one, or a new size, is written down."""
        storage = tensor.untyped_storage()
        known = self._alive.get(storage._cdata)
        nbytes = storage.nbytes()
        if known is not None:
            if known.nbytes == nbytes:
                return known
            self._ended(known, storage._cdata)
        place = place or (self._device if known is None else known.device)
        record = Storage(self._count, nbytes, place, len(self._segments) - 1)
        if known is not None:
            record.kind, record.name = known.kind, known.name
        record.watch = weakref.ref(storage, partial(_end, weakref.ref(self), record, storage._cdata))
        self._alive[storage._cdata] = record
        self._count += 1
        self._events.append(record)
        return record

    def _ended(self, record: Storage, address: int) -> None:
        if self._alive.get(address) is record:
            del self._alive[address]
            record.died, record.watch = len(self._events), None
            self._events.append(Free(record.number))

    def restart(self) -> None:
        """Write down the storages that are alive as there from the beginning, in the first segment."""
        for record in self._alive.values():
            record.segment = 0
            self._events.append(record)

    def finish(self) -> None:
        """Stop following storages."""
        for record in self._alive.values():
            record.watch = None
        self._alive.clear()


def _end(storages: weakref.ref[Storages], record: Storage, address: int, _: object) -> None:
    """End a storage, as the callback of its weak reference. It must keep nothing that the storage is part of."""
    there = storages()
    if there is not None:
        there._ended(record, address)
