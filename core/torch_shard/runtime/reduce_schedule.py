"""Gradient reductions of one backward: in which order, how many at a time, and what is left at the end.

Order: the reverse order of first use in forward, which all ranks share; a unit whose gradients are complete waits behind
one whose are not. Units that had a parameter without any gradient in the backward before, on every rank, come last, where
they hold up no other. The end of a backward compares with the other ranks and reduces the rest, units without a gradient
on this rank too.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch

from ..comm.collectives import Collectives
from ..comm.divergence import Agreement
from ..comm.gradient_reduction import IN_FLIGHT, IN_FLIGHT_ON_STREAMS, Reduction
from ..errors import ShardError
from ..unit.gradient_buffer import SEEN, WANTED, GradientBuffer
from .registry import runtime_of

if TYPE_CHECKING:
    from ..comm.comm_hook import CommHook, HookedReduction
    from ..unit.flat_buffer import FlatBuffer
    from ..unit.unit import Unit
    from .ports import StepInBackward

PAUSE = 0.2  # seconds
# ... that a rank whose backward failed waits for reductions inside its copy, so that the copies stay in step. Where the others
# have failed with it, they come at once.
_WAIT_ACROSS = 5.0
_NO_PAUSE_FOR = 100  # backwards without a pause, once one was in vain because of such a rank


class Reductions:
    """Those of one engine."""

    def __init__(self, collectives: Collectives, issued: Callable[[str, Unit], None]) -> None:
        self.collectives, self._issued = collectives, issued
        self._used: list[Unit] = []
        self._order: list[Unit] = []
        self._in_flight: list[tuple[GradientBuffer, Reduction | HookedReduction]] = []
        self._no_pause = 0
        # Indices of units with a parameter that the last backward had no gradient of, on any rank.
        self._incomplete: set[int] = set()
        # Called with gradients as soon as they are published; without it they are published at the end of a backward.
        self.on_published: Callable[[GradientBuffer], None] | None = None
        self._units: dict[int, tuple[Unit, FlatBuffer]] = {}  # by gradient buffer
        # Gradients that are published at the end all the same: backward may need their unit's values once more.
        self._postponed: dict[int, GradientBuffer] = {}
        self._marked: dict[int, list[int]] | None = None  # what the ranks have agreed on, once they have
        self.hook: CommHook | None = None  # that reduces in place of the engine

    def begin(self, forward_order: Iterable[Unit]) -> None:
        """A backward begins; `forward_order` has the units that forward used, the latest last."""
        self.collectives.forget_ended()  # of a backward that failed
        self._used = [u for u in forward_order if any(f.gradients.wants_any for f in u.flats)]
        backwards = self._used[::-1]
        self._order = sorted(backwards, key=lambda u: u.index in self._incomplete)  # stable
        self._no_pause = max(0, self._no_pause - 1)
        wanted = [f for u in self._order for f in u.flats if f.gradients.wants_any]
        self.collectives.expect([buffer for f in wanted for buffer in f.gradients.buffers])

    @property
    def used(self) -> list[Unit]:
        """What the last forward with gradients has used, in its order."""
        return self._used

    def advance(self) -> None:
        """A flat buffer's gradients are complete: send what is next in order, as far as it is complete. Collective."""
        if self.collectives.in_one_order:
            return
        while self._order and not any(f.gradients.missing for f in self._order[0].flats):
            self._issue(self._order.pop(0))

    def _issue(self, unit: Unit, early: bool = False) -> None:
        """`early`: before the ranks have agreed who has a gradient, though not all of this rank's may be there."""
        unit.rounds += 1
        self._issued("reduce", unit)
        stepping = runtime_of(unit).in_backward
        # After the last node nothing is needed any more. Decided here and not when the sum is there: that may be any time.
        postponed = stepping is not None and self._marked is None and (stepping.postpones(unit) or early)
        for flat in unit.flats:
            gradients = flat.gradients
            # Once the ranks have agreed, what any of them has: it may come of a graph that the last forward knows nothing of.
            if not gradients.wants_any and (self._marked is None or SEEN not in self._marked[id(flat)]):
                continue
            if postponed:
                self._postponed[id(gradients)] = gradients
            reduction = gradients.start_reduction(unit.reduce_text)
            if self.on_published is not None:
                self._units[id(gradients)] = unit, flat
            if reduction is not None:
                self._in_flight.append((gradients, reduction))
            elif self.on_published is not None:
                self._publish_now(gradients)
        limit = IN_FLIGHT if self.collectives.reduce_stream is None else IN_FLIGHT_ON_STREAMS
        while self._in_flight:
            oldest = self._in_flight[0][1]
            few = len(self._in_flight) <= limit
            if few and self.collectives.reduce_stream is not None:
                break  # else the peak of GPU memory would depend on who was faster
            if isinstance(oldest, Reduction) and not oldest.done():
                if few or self._no_pause:
                    break
                oldest.wait_for_own_part()
                if not oldest.settle(PAUSE):
                    self._no_pause = _NO_PAUSE_FOR
                    break
            self._collect_oldest()

    def _collect_oldest(self) -> None:
        gradients, reduction = self._in_flight.pop(0)
        gradients.collect(reduction)
        if self.on_published is not None:
            self._publish_now(gradients)

    def _publish_now(self, gradients: GradientBuffer) -> None:
        if id(gradients) in self._postponed:
            return
        unit, flat = self._units[id(gradients)]
        # Before the end of backward only complete units are reduced: all ranks have what this one has.
        marks = gradients.marks() if self._marked is None else self._marked[id(flat)]
        self._publish([(unit, flat)], {id(flat): marks})
        assert self.on_published is not None
        self.on_published(gradients)

    def compare(self, units: list[Unit], agreement: Agreement, idle: set[int], stepping: StepInBackward | None) -> bool:
        """At the end of backward: agree with the other ranks on what is left, and send it. Collective; nothing in it waits for a
        reduction without a limit.

        `idle` are the indices of units that this rank gathered, but did not need; `stepping`, where units are stepped during
        backward. Returns whether some unit was needed by no rank.
        """
        if self.hook is not None:
            # A hook has ended when it returns, and needs all ranks for that: each calls it for all units before they compare.
            while self._order:
                self._issue(self._order.pop(0), early=True)
        # Does this rank come with reductions that it could not issue in time?
        marks: list[int] = [any(not u.rounds and u.index not in self._incomplete for u in self._order)]
        for unit in units:
            unreduced = any(True in f.gradients.holds for f in unit.flats)
            marks.append(unit.rounds + unreduced)
            marks.append(unit.index not in idle)
            for flat in unit.flats:
                marks += flat.gradients.marks()
        marks.append(self.hook is not None and self.hook.error is not None)
        if stepping is not None:
            marks += stepping.marks()
        agreed = agreement.check("the end of backward", torch.tensor(marks, dtype=torch.uint8))
        assert agreed is not None
        answer, at = agreed.tolist(), 1
        if not answer[0]:
            self._no_pause = 0  # a partner was slow for once
        rounds: dict[int, int] = {}
        marked: dict[int, list[int]] = {}
        needless = False
        for unit in units:
            rounds[unit.index] = answer[at]
            needless |= not answer[at + 1]
            at += 2
            for flat in unit.flats:
                marked[id(flat)] = answer[at : at + len(flat.params)]
                at += len(flat.params)
        if self.hook is not None and units:
            self.hook.raise_together(runtime_of(units[0]), bool(answer[at]))
        if stepping is not None:
            stepping.check(answer[at + 1 :])
        self._note_incomplete(marked)
        self._marked = marked
        for unit in self._order:  # first what other ranks have issued before they came here
            if unit.rounds < min(1, rounds[unit.index]):
                self._issue(unit)
        while late := [u for u in reversed(units) if u.rounds < rounds[u.index]]:
            for unit in late:
                self._issue(unit)
        return needless

    def flush(self, units: list[Unit]) -> None:
        """Behind :meth:`compare`: wait for all reductions, publish every `.grad`, and run the hooks on them."""
        assert self._marked is not None
        while self._in_flight:
            self._collect_oldest()
        postponed, self._postponed = self._postponed, {}
        for gradients in postponed.values():
            self._publish_now(gradients)
        if self.on_published is None:
            self._publish([(unit, flat) for unit in units for flat in unit.flats], self._marked)
        self._marked = None
        self._units.clear()

    def _note_incomplete(self, marked: dict[int, list[int]]) -> None:
        for unit in self._used:
            if any(WANTED in marked[id(flat)] for flat in unit.flats):
                self._incomplete.add(unit.index)
            else:
                self._incomplete.discard(unit.index)

    @staticmethod
    def _publish(flats: list[tuple[Unit, FlatBuffer]], marked: dict[int, list[int]]) -> None:
        called = []
        with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
            for unit, flat in flats:
                touched = flat.gradients.publish(marked[id(flat)])
                if unit.post_hooks:
                    called += [(unit, flat, i) for i in touched]
        for unit, flat, i in called:
            for hook in list(unit.post_hooks.get(flat.layout.slots[i].name, {}).values()):
                hook(flat.params[i])

    def abandon(self) -> None:
        """Backward failed. A partner may never come, and the failure being handled says why: don't wait for long."""
        c = self.collectives
        # Where the ranks know that they are out of step already, they send nothing more.
        copies = c.across_channel is not None and not c.across_channel.groups.broken
        deadline = time.monotonic() + min(_WAIT_ACROSS if copies else PAUSE * len(self._in_flight), c.watch.timeout)
        for _, reduction in self._in_flight:
            left = max(0.0, deadline - time.monotonic())
            with contextlib.suppress(ShardError):
                reduction.abandon(left if copies else min(PAUSE, left))
        self._in_flight.clear()
        self._marked = None
        self._units.clear()
        self._postponed.clear()
        self._order, self._used = [], []
        self.collectives.forget_ended()
