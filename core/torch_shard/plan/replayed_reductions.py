"""The gradients of a replayed step, from their arrival through the reductions to the shards that are ``.grad``."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from ..config.offload import IN_FLIGHT
from ..schedule.reduction_order import has_too_many, reduction_order
from .step_trace import Kind
from .unit_stand_in import FlatStandIn, Log, UnitStandIn


@dataclass(eq=False)
class _Reduction:
    """A reduction in flight."""

    flat: FlatStandIn
    numbers: list[int]  # of the collectives
    sum: int  # the storage of the rank's shard of the sum
    dtype: torch.dtype  # of the sum
    buffers: list[int] = field(default_factory=list)  # other storages, of the full layout


class ReplayedReductions:
    """A stand-in for :class:`torch_shard.runtime.reduce_schedule.ReduceSchedule` and ``GradientBuffer``, with their allocations.

    Over Gloo the host collects those reductions that have ended, which depends on the other ranks. The replay assumes that none
    ends early, which takes most memory.
    """

    def __init__(self, units: Sequence[UnitStandIn], shard_ranks: int, data_parallel: int, log: Log) -> None:
        """Make the reductions of a model.

        Args:
            units: its units.
            shard_ranks: the number of ranks among which parameters are cut.
            data_parallel: the number of ranks whose gradients are averaged.
            log: the log to which events are written.
        """
        self._units, self._log = units, log
        self._cut, self._reduces = shard_ranks > 1, data_parallel > 1
        self._shard_ranks, self._replicas = shard_ranks, data_parallel // shard_ranks
        self._used: list[UnitStandIn] = []
        self._order: list[UnitStandIn] = []
        self._in_flight: list[_Reduction] = []
        self._leaving: list[tuple[int, int]] = []  # the number and the memory of copies to the host
        # Indices of units with a parameter that had no gradient in the last backward.
        self._incomplete: set[int] = set()

    def begin(self, forward_order: Sequence[UnitStandIn]) -> None:
        """Begin a backward; `forward_order` has the units that forward has used, the latest last."""
        for unit in self._units:
            for flat in unit.flats:
                flat.arrived.clear()
        self._used = [unit for unit in (forward_order if self._cut else self._units) if unit.trains]
        self._order = reduction_order(self._used, self._incomplete)
        trained = [flat for unit in self._order for flat in unit.flats if flat.trains]
        self._log.expect([(flat.layout.numel, self._dtype(flat)) for flat in trained for _ in ("sent", "received")])

    def accept(self, flat: FlatStandIn, name: str, storage: int | None) -> None:
        """Take the gradient of parameter `name`; `storage` is its memory, where it ends with being copied."""
        if self._log.on_streams and storage is not None:  # it waits for the others of its unit
            flat.held.append(storage)
            storage = None
        else:
            self._open(flat)
        flat.arrived.add(name)
        while self._order and all(flat.is_complete for flat in self._order[0].flats):
            self._issue(self._order.pop(0))
        if storage is not None:  # autograd lets go of it when the engine returns
            self._log.free(storage)

    def end(self) -> None:
        """End the backward: reduce what is left, and make the sums ``.grad``."""
        for unit in self._used:
            if all(flat.is_complete for flat in unit.flats):
                self._incomplete.discard(unit.index)
            else:
                self._incomplete.add(unit.index)
        for unit in self._order:
            if any(flat.arrived for flat in unit.flats):
                self._issue(unit)
        self._order = []
        while self._in_flight:
            self._collect()
        self._make_room(0)
        for flat in (flat for unit in self._units for flat in unit.flats):
            for result in flat.results:
                self._publish(flat, result)
            flat.results = []
        self._log.drop_spares()

    def _dtype(self, flat: FlatStandIn) -> torch.dtype:
        """Return the dtype of the buffer into which gradients are copied."""
        if not self._reduces and flat.offloaded:
            return flat.dtypes.crossing(reduced=False)
        return flat.dtypes.reduce if self._reduces else flat.dtypes.grad

    def _open(self, flat: FlatStandIn) -> int:
        if flat.buffer is None:
            self._make_room(IN_FLIGHT)
            dtype = self._dtype(flat)
            kind: Kind = "gradient" if not self._cut and dtype == flat.dtypes.grad else "reduction"
            flat.buffer = self._log.take(flat.layout.numel, dtype, flat.unit, kind)
        return flat.buffer

    def _issue(self, unit: UnitStandIn) -> None:
        for flat in unit.flats:
            if flat.trains:
                self._start(flat)
        while has_too_many(len(self._in_flight), self._log.on_streams):
            self._collect()

    def _start(self, flat: FlatStandIn) -> None:
        log, dtype, grad = self._log, self._dtype(flat), flat.dtypes.grad
        sent = self._open(flat)
        for storage in flat.held:
            log.free(storage)
        flat.held, flat.buffer = [], None
        nbytes = flat.layout.numel * dtype.itemsize
        if not self._reduces:
            self._keep(flat, sent, dtype)
            return
        buffers = []
        if not self._cut and (log.on_streams or dtype == grad):
            summed = sent
        elif log.on_streams:
            kind: Kind = "gradient" if dtype == grad else "reduction"
            summed = log.allocate(flat.shard_nbytes(dtype), kind, flat.unit, "reduce")
            buffers = [sent]
        else:
            # The sum is made when the reduction has ended, perhaps at once. But then an earlier one may have had to wait, so that
            # the buffers are not fewer either.
            buffers = [sent]
            if self._cut:
                buffers.append(log.take(flat.layout.numel, dtype, flat.unit))
            summed = self._new_grad(flat)
            dtype = grad
        numbers = []
        if self._cut:
            numbers.append(log.start("reduce_scatter", flat.unit, nbytes, self._shard_ranks))
        if self._replicas > 1:
            each = nbytes // self._shard_ranks
            numbers.append(log.start("all_reduce", flat.unit, each, self._replicas, self._shard_ranks))
        self._in_flight.append(_Reduction(flat, numbers, summed, dtype, buffers))

    def _collect(self) -> None:
        oldest = self._in_flight.pop(0)
        flat = oldest.flat
        for number in oldest.numbers:
            self._log.wait(number)
        if self._cut and not self._log.on_streams and self._dtype(flat) != flat.dtypes.grad:
            # Over Gloo each rank's part is widened before it is added.
            self._log.free(self._log.allocate(flat.shard_nbytes(flat.dtypes.grad), "temporary", flat.unit))
        for buffer in oldest.buffers:
            self._log.give(buffer, flat.layout.numel, self._dtype(flat))
        self._keep(flat, oldest.sum, oldest.dtype)

    def _keep(self, flat: FlatStandIn, result: int, dtype: torch.dtype) -> None:
        """Keep a reduced shard, which may have a narrower dtype than ``.grad``."""
        if flat.offloaded:
            number = self._log.start("to_host", flat.unit, flat.shard_nbytes(dtype))
            self._leaving.append((number, result))
            if flat.grad is not None:  # added there
                if flat.spare is None and self._log.on_streams and dtype == flat.dtypes.grad:
                    nbytes = flat.shard_nbytes(dtype)
                    flat.spare = self._log.allocate(nbytes, "gradient", flat.unit, on_host=True)
                flat.with_grad |= flat.arrived
                return
            result = self._log.allocate(flat.shard_nbytes(flat.dtypes.grad), "gradient", flat.unit, on_host=True)
        elif dtype != flat.dtypes.grad:
            narrow, result = result, self._new_grad(flat)
            if self._cut:
                self._log.free(narrow)
            else:
                self._log.give(narrow, flat.layout.numel, dtype)
        if flat.grad is not None and self._reduces:  # added at once
            self._publish(flat, result)
        else:
            flat.results.append(result)

    def _make_room(self, count: int) -> None:
        """Let at most `count` copies to the host take memory of the device."""
        while len(self._leaving) > count:
            number, storage = self._leaving.pop(0)
            self._log.wait(number)
            self._log.free(storage)

    def _publish(self, flat: FlatStandIn, result: int) -> None:
        if flat.grad is None:
            flat.grad = result
        else:
            self._log.free(result)
        flat.with_grad |= flat.arrived

    def _new_grad(self, flat: FlatStandIn) -> int:
        return self._log.allocate(flat.shard_nbytes(flat.dtypes.grad), "gradient", flat.unit)
