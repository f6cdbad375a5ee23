"""The order of gradient reductions in a backward, and how many run at a time.

Units are reduced in the reverse order of their first use in forward, which all ranks share. A unit whose gradients are
complete waits for the units before it. Units with a parameter that had no gradient on any rank in the backward before come
last, where they hold up no other unit. At the end of a backward the ranks compare what they have reduced, and reduce the
rest, including units of which a rank has no gradient.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch

from ..comm.collectives import Collectives
from ..comm.divergence import OperationSequence
from ..comm.gradient_reduction import IN_FLIGHT, IN_FLIGHT_ON_STREAMS, Reduction
from ..errors import ShardError
from ..unit.gradient_buffer import SEEN, WANTED, GradientBuffer
from .registry import runtime_of

if TYPE_CHECKING:
    from ..comm.comm_hook import CommHook
    from ..unit.flat_buffer import FlatBuffer
    from ..unit.unit import Unit
    from .ports import StepInBackward

# Seconds to wait for the oldest reduction where too many are in flight.
PAUSE = 0.2
# Seconds that a rank whose backward has failed waits for reductions within its replica, so that replicas stay in step. If the
# other ranks have failed as well, these reductions end at once.
_WAIT_WITHIN_REPLICA = 5.0
# Number of backwards in which nobody waits for PAUSE, once that was in vain.
_NO_PAUSE_FOR = 100


class ReduceSchedule:
    """The gradient reductions of one engine."""

    def __init__(self, collectives: Collectives, issued: Callable[[str, Unit], None]) -> None:
        """Make the schedule; `issued` is called with ``"reduce"`` and the unit before each reduction."""
        self.collectives, self._issued = collectives, issued
        self._used: list[Unit] = []
        self._order: list[Unit] = []
        self._in_flight: list[tuple[GradientBuffer, Reduction]] = []
        self._no_pause = 0
        # Indices of units with a parameter of which no rank had a gradient in the last backward.
        self._incomplete: set[int] = set()
        # If set, gradients are published as soon as they are reduced, and this is called with them. Otherwise they are
        # published at the end of a backward.
        self.on_published: Callable[[GradientBuffer], None] | None = None
        self._units: dict[int, tuple[Unit, FlatBuffer]] = {}  # by the id of the gradient buffer
        # Gradients that wait for the end of backward despite `on_published`, since backward may need their unit once more.
        self._postponed: dict[int, GradientBuffer] = {}
        self._marked: dict[int, list[int]] | None = None  # the marks that the ranks have agreed on; None before that
        self.hook: CommHook | None = None  # the user's function that reduces in place of the engine

    def begin(self, forward_order: Iterable[Unit]) -> None:
        """Begin a backward; `forward_order` has the units that forward has used, the latest last."""
        self.collectives.forget_ended()  # a failed backward may have left some
        self._used = [u for u in forward_order if any(f.gradients.wants_any for f in u.flats)]
        backwards = self._used[::-1]
        self._order = sorted(backwards, key=lambda u: u.index in self._incomplete)  # stable
        self._no_pause = max(0, self._no_pause - 1)
        wanted = [f for u in self._order for f in u.flats if f.gradients.wants_any]
        self.collectives.expect([buffer for f in wanted for buffer in f.gradients.buffers])

    @property
    def used(self) -> list[Unit]:
        """The units of the running backward, in the order of forward."""
        return self._used

    def advance(self) -> None:
        """Reduce the next units in order, as far as their gradients are complete. Collective."""
        if self.collectives.in_one_order:
            return
        while self._order and not any(f.gradients.missing for f in self._order[0].flats):
            self._issue(self._order.pop(0))

    def _issue(self, unit: Unit, early: bool = False) -> None:
        """Start the reduction of `unit`, and collect finished ones.

        `early`: some of this rank's gradients may be missing, and the ranks have not agreed yet on who has one.
        """
        unit.rounds += 1
        self._issued("reduce", unit)
        stepping = runtime_of(unit).in_backward
        # After the last node no unit is needed any more. This is decided here, because the sum may be there at any time.
        postponed = stepping is not None and self._marked is None and (stepping.postpones(unit) or early)
        for flat in unit.flats:
            gradients = flat.gradients
            # Once the ranks have agreed, a gradient counts that any rank has seen, also of a graph older than the last forward.
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
                break  # the peak of GPU memory must not depend on timing
            if not oldest.done():
                if few or self._no_pause:
                    break
                oldest.wait_for_own_part()
                if not oldest.wait_at_most(PAUSE):
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
        # Before the end of backward only complete units are reduced, so that all ranks have what this one has.
        marks = gradients.marks() if self._marked is None else self._marked[id(flat)]
        self._publish([(unit, flat)], {id(flat): marks})
        assert self.on_published is not None
        self.on_published(gradients)

    def compare(
        self, units: list[Unit], operations: OperationSequence, idle: set[int], stepping: StepInBackward | None
    ) -> bool:
        """Agree with the other ranks on what is left at the end of backward, and start to reduce it. Collective.

        Every wait for a reduction in here has a limit.

        Args:
            units: all units of the engine.
            operations: with the other ranks.
            idle: indices of units that this rank unsharded, but did not need.
            stepping: the optimizer that steps during backward, if any.

        Returns:
            True if no rank has needed some unit in backward.
        """
        if self.hook is not None:
            # A hook returns when its reduction has ended, which needs all ranks. So each rank calls it for all units before
            # they compare.
            while self._order:
                self._issue(self._order.pop(0), early=True)
        # First: True if this rank could not issue some reduction in time.
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
        agreed = operations.check("the end of backward", torch.tensor(marks, dtype=torch.uint8))
        assert agreed is not None
        answer, at = agreed.tolist(), 1
        if not answer[0]:
            self._no_pause = 0  # another rank was only slow
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
        for unit in self._order:  # first the reductions that other ranks have issued before they came here
            if unit.rounds < min(1, rounds[unit.index]):
                self._issue(unit)
        while late := [u for u in reversed(units) if u.rounds < rounds[u.index]]:
            for unit in late:
                self._issue(unit)
        return needless

    def flush(self, units: list[Unit]) -> None:
        """Wait for all reductions after :meth:`compare`, publish every `.grad`, and run users' hooks on them."""
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
        """Drop all reductions after a backward that has failed.

        Another rank may never come to them, so this does not wait for long; the failure that is being handled says why.
        """
        c = self.collectives
        # Ranks that are out of step already send nothing more.
        replicas = c.replica_channel is not None and not c.replica_channel.groups.broken
        deadline = time.monotonic() + min(
            _WAIT_WITHIN_REPLICA if replicas else PAUSE * len(self._in_flight), c.watchdog.timeout
        )
        for _, reduction in self._in_flight:
            left = max(0.0, deadline - time.monotonic())
            with contextlib.suppress(ShardError):
                reduction.abandon(left if replicas else min(PAUSE, left))
        self._in_flight.clear()
        self._marked = None
        self._units.clear()
        self._postponed.clear()
        self._order, self._used = [], []
        self.collectives.forget_ended()
