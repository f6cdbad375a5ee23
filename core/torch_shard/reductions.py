"""Gradient reductions of one backward: in which order, how many at a time, and what is left at the end.

Order: the reverse order of use in forward, which all ranks share; a unit whose gradients are complete waits behind one
whose are not. The end of a backward compares with the other ranks and reduces the rest, units without a gradient on this
rank too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch

from .agreement import Agreement
from .collectives import Collectives, Reduction
from .errors import ShardError
from .flat_buffer import FlatBuffer

if TYPE_CHECKING:
    from .unit import Unit

# Reductions in flight: each holds two buffers of its unit's size. Above this many, backward pauses for the oldest, but
# not for long: a rank that leaves a parameter unused issues its reductions at the end of backward only, and until then
# it may need a gather from this one.
_IN_FLIGHT = 1
PAUSE = 0.2  # seconds
_NO_PAUSE_FOR = 100  # backwards without a pause after one that was in vain


class Reductions:
    """Those of one engine."""

    def __init__(self, collectives: Collectives, issued: Callable[[str, Unit], None]) -> None:
        self.collectives, self._issued = collectives, issued
        self._order: list[Unit] = []
        self._in_flight: list[tuple[FlatBuffer, Reduction]] = []
        self._no_pause = 0

    def begin(self, forward_order: Iterable[Unit]) -> None:
        """A backward begins; `forward_order` has the units that forward used, the latest last."""
        self._order = [u for u in forward_order if any(_wants(f) for f in u.flats)]
        self._order.reverse()
        self._no_pause = max(0, self._no_pause - 1)
        self.collectives.expect([(f.layout.numel, f.dtype) for u in self._order for f in u.flats if _wants(f)])

    def advance(self) -> None:
        """A gradient has arrived: send what is complete and next in order. Collective."""
        while self._order and _complete(self._order[0]):
            self._issue(self._order.pop(0))

    def _issue(self, unit: Unit) -> None:
        unit.rounds += 1
        self._issued("reduce", unit)
        for flat in unit.flats:
            if not _wants(flat):
                continue
            reduction = flat.start_reduction(f"the gradient reduction of unit {unit.name!r}")
            if reduction is not None:
                self._in_flight.append((flat, reduction))
        while self._in_flight:
            oldest = self._in_flight[0][1]
            few = len(self._in_flight) <= _IN_FLIGHT
            if few and self.collectives.reduce_stream is not None:
                break  # else the peak of GPU memory would depend on who was faster
            if not oldest.done():
                if few or self._no_pause:
                    break
                if not oldest.pending.settle(PAUSE):
                    self._no_pause = _NO_PAUSE_FOR
                    break
            self._collect_oldest()

    def _collect_oldest(self) -> None:
        flat, reduction = self._in_flight.pop(0)
        flat.collect(reduction.finish())

    def flush(self, units: list[Unit], agreement: Agreement, idle: set[int]) -> bool:
        """At the end of backward: reduce what is left, publish every `.grad`, and run the hooks on them. Collective.

        `idle` are the indices of units that this rank gathered, but did not need. Returns whether some unit was
        needed by no rank.
        """
        marks: list[int] = []
        for unit in units:
            unreduced = any(any(f.holds) for f in unit.flats)
            marks.append(unit.rounds + (1 if unreduced else 0))
            marks.append(0 if unit.index in idle else 1)
            marks += [1 if f.arrived[i] or f.holds[i] else 0 for f in unit.flats for i in range(len(f.params))]
        agreed = agreement.check("the end of backward", torch.tensor(marks, dtype=torch.uint8))
        assert agreed is not None
        answer = iter(agreed.tolist())
        rounds: dict[int, int] = {}
        used: dict[int, list[bool]] = {}
        needless = False
        for unit in units:
            rounds[unit.index] = next(answer)
            needless |= not next(answer)
            for flat in unit.flats:
                used[id(flat)] = [bool(next(answer)) for _ in flat.params]
        for unit in self._order:  # first what other ranks have issued before they came here
            if unit.rounds < min(1, rounds[unit.index]):
                self._issue(unit)
        while late := [u for u in reversed(units) if u.rounds < rounds[u.index]]:
            for unit in late:
                self._issue(unit)
        while self._in_flight:
            self._collect_oldest()
        self._publish(units, used)
        return needless

    @staticmethod
    def _publish(units: list[Unit], used: dict[int, list[bool]]) -> None:
        called = []
        for unit in units:
            for flat in unit.flats:
                touched = flat.publish(used[id(flat)]) if any(used[id(flat)]) else []
                flat.results = []
                if unit.post_hooks:
                    called += [(unit, flat, i) for i in touched]
        for unit, flat, i in called:
            for hook in list(unit.post_hooks.get(flat.layout.slots[i].name, {}).values()):
                hook(flat.params[i])

    def abandon(self) -> None:
        """Backward failed. A partner may never come, and the failure being handled says why: don't wait for long."""
        for _, reduction in self._in_flight:
            with contextlib.suppress(ShardError):
                reduction.pending.settle(PAUSE)
        self._in_flight.clear()


def _wants(flat: FlatBuffer) -> bool:
    return any(leaf.requires_grad for leaf in flat.leaves)


def _complete(unit: Unit) -> bool:
    for flat in unit.flats:
        for arrived, leaf in zip(flat.arrived, flat.leaves, strict=True):
            if not arrived and leaf.requires_grad:
                return False
    return True
