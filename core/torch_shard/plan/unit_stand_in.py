"""A stand-in for a unit in a replayed step: it has sizes and states, and writes down what a unit would allocate."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..comm.spare_buffers import SpareBuffers
from ..config.offload import Offload
from ..schedule.phases import PHASES
from ..schedule.unit_state import State
from .memory_estimate import layout_of
from .plan import ParamInfo, UnitPlan
from .step_trace import Allocation, CollectiveStart, CollectiveWait, Event, Free, Kind, Stream, Transfer


class Log:
    """The events of a replay. It reuses buffers of reductions as `Collectives` does.

    Attributes:
        events: the events so far.
        quiet: True if nothing is written down, though storages get numbers.
        on_streams: True if the device has streams, so that its allocator reuses memory by itself.
    """

    def __init__(self, device: str, number: int) -> None:
        """Begin with storages numbered from `number`."""
        self.events: list[Event] = []
        self.quiet = False
        self.on_streams = device != "cpu"
        self._device = device
        self._number = number
        self._collectives = 0
        self._spares: SpareBuffers[int] = SpareBuffers()
        self._given_back: set[int] = set()  # the storages of spare buffers

    def add(self, event: Event) -> None:
        if not self.quiet:
            self.events.append(event)

    def allocate(self, nbytes: int, kind: Kind, name: str, stream: Stream = "compute", on_host: bool = False) -> int:
        """Return the number of a new storage."""
        self._number += 1
        device = "cpu" if on_host else self._device
        self.add(Allocation(self._number, nbytes, device, kind, name, stream if self.on_streams else "compute"))
        return self._number

    def free(self, storage: int) -> None:
        self.add(Free(storage))

    def start(self, kind: Transfer, unit: str, nbytes: int, ranks: int = 1, stride: int = 1) -> int:
        """Return the number of a collective that begins."""
        self._collectives += 1
        self.add(CollectiveStart(self._collectives, kind, unit, nbytes, ranks, stride))
        return self._collectives

    def wait(self, collective: int) -> None:
        self.add(CollectiveWait(collective))

    # -- buffers of reductions ----------------------------------------------------------------------------------------

    def expect(self, keys: Sequence[tuple[int, torch.dtype]]) -> None:
        self._spares.expect(keys)

    def take(self, numel: int, dtype: torch.dtype, unit: str, kind: Kind = "reduction") -> int:
        """Return the storage of a buffer for a reduction, perhaps one that was given back."""
        found = self._spares.take((numel, dtype))
        self._given_back.discard(-1 if found is None else found)
        self._free_dropped()
        return self.allocate(numel * dtype.itemsize, kind, unit) if found is None else found

    def give(self, storage: int, numel: int, dtype: torch.dtype) -> None:
        """Give a buffer back, which is kept or freed."""
        self._given_back.add(storage)
        if not self.on_streams:
            self._spares.give((numel, dtype), storage)
        self._free_dropped()

    def drop_spares(self) -> None:
        self._spares.drop()
        self._free_dropped()

    def _free_dropped(self) -> None:
        """Free the buffers that were given back and are not kept any more."""
        for storage in self._given_back.difference(self._spares):
            self.free(storage)
            self._given_back.discard(storage)


@dataclass(eq=False)
class FlatStandIn:
    """One flat buffer.

    Attributes:
        unit: the name of its unit.
        params: its parameters.
        ranks: the ranks among which it is cut.
        offloaded: True if its shards are in host memory.
        full: the storage of the full parameters; None while they have no memory.
        buffer: the storage into which gradients are copied; None before the first one.
        held: storages of gradients that wait to be copied.
        arrived: the names of parameters whose gradient the running backward has brought.
        with_grad: the names of parameters that have a ``.grad``.
        grad: the storage of these; None if there is none.
        spare: with offload the storage in which gradients arrive that are added to others; None before the first ones.
        results: storages of reduced shards that are not published yet.
    """

    unit: str
    params: tuple[ParamInfo, ...]
    ranks: int
    offloaded: bool = False
    full: int | None = None
    buffer: int | None = None
    held: list[int] = field(default_factory=list)
    arrived: set[str] = field(default_factory=set)
    with_grad: set[str] = field(default_factory=set)
    grad: int | None = None
    spare: int | None = None
    results: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.layout = layout_of(self.params, self.ranks)
        self.dtypes = self.params[0].dtypes
        self.trains = self.params[0].requires_grad
        self.gathers = self.ranks > 1 or self.dtypes.casts or self.offloaded
        self.full_nbytes = self.layout.numel * self.dtypes.compute.itemsize
        self.names = frozenset(p.name for p in self.params) if self.trains else frozenset[str]()

    @property
    def is_complete(self) -> bool:
        """True if no gradient is missing."""
        return self.arrived >= self.names

    def shard_nbytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of a rank's shard in `dtype`, padding included."""
        return self.layout.shard_numel * dtype.itemsize

    def clear(self, names: Iterable[str], log: Log) -> None:
        """Set the ``.grad`` of parameters to None."""
        self.with_grad.difference_update(names)
        if not self.with_grad and self.grad is not None:
            log.free(self.grad)
            self.grad = None


class UnitStandIn:
    """One unit, for :class:`torch_shard.schedule.unshard_schedule.UnshardSchedule`."""

    exposed = False

    def __init__(self, plan: UnitPlan, index: int, ranks: int, log: Log, offload: Offload | None) -> None:
        self.name, self.index, self._log = plan.name, index, log
        self.params = plan.params
        self.flats = [FlatStandIn(plan.name, params, ranks, offload is not None) for params in plan.flat_buffers]
        self._crosses = offload is not None and offload.params
        self._ranks = ranks
        self.gathers = any(flat.gathers for flat in self.flats)
        self.trains = any(flat.trains for flat in self.flats)
        self.state = State.SHARDED if self.gathers else State.FULL
        self.running = 0
        self.uses: list[Any] = []
        self.kept: list[Any] = []
        self.refill = self.awaits_trigger = self.outdated = self.stale = False
        self.updated_on_host = False  # since it was on the device
        self.event_texts = [f"gathers unit {plan.name!r} in {phase}" for phase in PHASES]
        self._pending: int | None = None

    def is_stale(self) -> bool:
        return self.stale

    def unshard(self, from_secondary: bool = False) -> None:
        if self.state is not State.SHARDED:
            return
        self.outdated = self.stale = False
        for flat in self.flats:
            if flat.gathers:
                flat.full = self._log.allocate(flat.full_nbytes, "gathered", self.name, "gather")
        if self._crosses or self.updated_on_host:
            self.updated_on_host = False
            crosses = [flat for flat in self.flats if self._crosses or flat.trains]
            crossing = sum(flat.shard_nbytes(flat.dtypes.compute) for flat in crosses)
            self._pending = self._log.start("to_device", self.name, crossing)
        if self._ranks > 1:
            if self._pending is not None:  # on the same stream
                self._log.wait(self._pending)
            nbytes = sum(flat.full_nbytes for flat in self.flats)
            self._pending = self._log.start("all_gather", self.name, nbytes, self._ranks)
        self.state = State.GATHERING

    def wait(self) -> None:
        if self.state is State.GATHERING:
            if self._pending is not None:
                self._log.wait(self._pending)
            self._pending, self.state = None, State.FULL

    def reshard(self, for_backward: bool = False) -> None:
        if not self.gathers or self.state is State.SHARDED:
            return
        self.wait()
        for flat in self.flats:
            if flat.full is not None:
                self._log.free(flat.full)
                flat.full = None
        self.state = State.SHARDED

    def note_resharded(self) -> None:
        """Do nothing: secondary shards are not modelled."""

    def drop_secondary_shards(self) -> None:
        """Do nothing: secondary shards are not modelled."""
