"""The schedule of unshards and reshards: units are unsharded in one order on all ranks, and prefetched.

Every unshard is an event of a sequence that all ranks must share (:mod:`.gather_order`). The units that the remembered order
predicts are prefetched. An unshard that was not predicted is first agreed upon with the other ranks, so that ranks which take
different ways find out before their collectives mix.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic

import torch

from ..config.shard_config import ShardConfig
from .gather_order import Event, GatherOrder
from .phases import BACKWARD, FORWARD
from .ports import LoneReadsPort, OperationsPort, ScheduledUse, UnitT
from .unit_state import State


class UnshardSchedule(Generic[UnitT]):
    """The unshards and reshards of one sharded model."""

    def __init__(
        self, config: ShardConfig, replicated: bool, operations: OperationsPort, lone: LoneReadsPort[UnitT]
    ) -> None:
        """Make the schedule of a model without units.

        Args:
            config: the settings, of which strategy and prefetch count.
            replicated: True if each of several ranks has all of every parameter, so that an unshard is a cast, which concerns no
                other rank.
            operations: the operations that the ranks compare.
            lone: the reads by this rank alone.
        """
        self.lone = lone
        self.units: dict[int, UnitT] = {}  # by index, with gaps in the copy of a submodule; see Runtime.add
        self.order = GatherOrder(config.prefetch)
        self.operations = operations
        operations.on_difference = self._forget
        self._replicated = replicated
        self.gathered: dict[int, UnitT] = {}  # units that are unsharded or being unsharded, by index
        self._ahead: set[int] = set()  # indices of units that were prefetched, and have not been used since
        self.fresh = False  # no unit was unsharded yet in this forward
        self.fresh_backward = False  # the same in this backward
        self.passed: set[int] = set()  # indices of units that were unsharded in this backward for other ranks only
        self.needed: set[int] = set()  # indices of units whose backward has begun on this rank
        self.double_backward = False  # a graph of gradients reads unsharded parameters, so that nothing is resharded
        self._keeps_forward = not config.reshards  # units stay unsharded from forward to the end of backward
        self.keeps_on = config.strategy == "shard_optim"  # units stay unsharded until the parameters change

    def _keeps(self) -> bool:
        return self.keeps_on or (self._keeps_forward and torch.is_grad_enabled())

    def begin_backward(self) -> None:
        """Begin a backward, in which no unit was unsharded yet."""
        self.fresh_backward = True
        self.passed.clear()
        self.needed.clear()

    def _forget(self) -> None:
        # Ranks that have differed remember different orders of unshards.
        self.order.forget()
        self._ahead.clear()

    # -- unshard ------------------------------------------------------------------------------------------------
    def unshard(self, unit: UnitT, phase: int) -> None:
        """Unshard `unit`, and start to prefetch the next units. Collective."""
        if self._replicated:
            if unit.state is State.FULL and not unit.running and not unit.uses and unit.is_stale():
                unit.reshard()
            self._gather(unit, phase)
            unit.wait()
            return
        if self.lone.running:
            self.lone.unshard(unit)
            return
        idle = unit.state is not State.SHARDED and not unit.running and not unit.uses
        # A stale unit was edited after the ranks have compared at the beginning of the forward, so by code that all ranks run.
        edited = idle and phase != BACKWARD and unit.is_stale()
        if self.keeps_on and self._is_current(unit) and not (edited or unit.index in self._ahead):
            self.gathered[unit.index] = unit
            unit.wait()
            return
        self._ahead.discard(unit.index)
        if phase == BACKWARD:
            first, self.fresh_backward = self.fresh_backward, False
            self.needed.add(unit.index)
        else:
            first, self.fresh = self.fresh, False
        event: Event = (phase, unit.index, first)
        upcoming = None
        if not self.order.repeats(event):
            self._follow(unit, event)
            upcoming = [self.units[i] for i in self.order.upcoming()]
        if phase != BACKWARD:
            if edited or (idle and unit.outdated):
                unit.reshard()
            if upcoming is not None and not self._keeps():
                self.reshard_unused((unit, *upcoming), for_backward=phase == FORWARD)
        self._gather(unit, phase)
        unit.wait()
        for other in upcoming or ():
            if self.keeps_on and other.state is State.SHARDED:
                self._ahead.add(other.index)  # the next use of a unit that was unsharded already is no event
            self._gather(other, phase)

    def _gather(self, unit: UnitT, phase: int) -> None:
        if unit.state is State.SHARDED or unit.refill:
            if phase != BACKWARD:
                unit.drop_secondary_shards()
            unit.unshard(from_secondary=phase == BACKWARD)
        self.gathered[unit.index] = unit

    def _follow(self, unit: UnitT, event: Event) -> None:
        if event[0] == BACKWARD and not event[2]:
            self._pass_over(event)
        self._note(event)
        if not self.order.advance(event):
            self.operations.check(f"the agreement to gather unit {unit.name!r}, which did not follow here before")

    def _note(self, event: Event) -> None:
        phase, index, _ = event
        self.operations.note(phase * 1_000_003 + index + 17, self.units[index].event_texts[phase])

    def _pass_over(self, until: Event | None) -> None:
        """Take part in the unshards that are predicted before `until` (None: before the end of backward). Collective.

        A part of the model may be in the loss of other ranks only, which need these unshards.
        """
        for event in self.order.between(until, len(self.units)):
            unit = self.units[event[1]]
            self._note(event)
            self.order.advance(event)
            self._gather(unit, BACKWARD)
            self.passed.add(unit.index)

    def end_backward(self) -> None:
        """Take part in the remaining unshards of other ranks, when the last node has run on this rank. Collective."""
        if not self.fresh_backward:
            self._pass_over(None)

    # -- reshard ------------------------------------------------------------------------------------------------
    @staticmethod
    def _is_current(unit: UnitT) -> bool:
        # `unit.is_stale()` would not do: all ranks must come to the same answer (see `changes`).
        return unit.state is not State.SHARDED and not unit.refill and not unit.outdated

    def changes(self) -> torch.Tensor | None:
        """Return marks of the units that this rank has changed, or may have changed unseen, for the ranks to agree upon.

        Only ``shard_optim`` needs this, where a forward begins; None for other strategies.
        """
        if not self.keeps_on:
            return None
        marks = [unit.outdated or unit.exposed or unit.is_stale() for unit in self.units.values()]
        return torch.tensor(marks, dtype=torch.uint8, device="cpu")

    def note_changes(self, marks: torch.Tensor | None) -> None:
        """Note which units any rank has changed, by the :meth:`changes` of all ranks."""
        if marks is None:
            return
        for unit, changed in zip(self.units.values(), marks.tolist(), strict=True):
            unit.outdated = bool(changed)
            if changed and not (unit.state is State.SHARDED or unit.running or unit.uses):
                self.reshard(unit)  # at one place on all ranks, or some would prefetch it

    def reshard(self, unit: UnitT, for_backward: bool = False) -> None:
        """Reshard a unit; if backward may reach the unit without a trigger, only take part in its next unshard."""
        if self.keeps_on and self._is_current(unit):
            return
        if unit.kept:
            unit.refill = True
            # The other ranks will unshard from secondary shards; this rank keeps the full buffer in place of one.
            if for_backward:
                unit.note_resharded()
            return
        unit.reshard(for_backward)
        self.gathered.pop(unit.index, None)

    def reshard_unused(self, besides: Sequence[UnitT] = (), for_backward: bool = False) -> None:
        """Reshard all units that no running forward and no begun backward needs, except those of `besides`."""
        if self.double_backward:
            return
        for unit in list(self.gathered.values()):
            if not (unit.running or unit.uses or unit in besides):
                self.reshard(unit, for_backward)

    def reshard_after_evaluation(self) -> None:
        """Reshard the units of a forward without gradients, except those that are being prefetched."""
        for unit in list(self.gathered.values()):
            if unit.state is State.FULL and not unit.running and not unit.uses and not self._keeps():
                self.reshard(unit)

    def reshard_behind(self, use: ScheduledUse) -> None:
        """Reshard the units whose forwards began after the end of `use`: once backward reaches `use`, their nodes have run."""
        if self.double_backward or self._keeps_forward:
            return
        for unit in list(self.gathered.values()):
            if unit is use.unit or unit.running or unit.awaits_trigger:
                continue
            if not unit.uses:
                if unit.index in self.passed:
                    self.reshard(unit)  # waits for the unit first, as all ranks do: they must release it at one place
            elif all([u.start >= use.end and u.task == use.task for u in unit.uses]):  # noqa: C419 (hot)
                unit.uses.clear()
                self.reshard(unit)

    def end_nested(self, task: int) -> None:
        """Reshard the units that only a nested backward has needed, which has ended."""
        for unit in list(self.gathered.values()):
            if any(u.task == task for u in unit.uses):
                unit.uses = [u for u in unit.uses if u.task != task]
                if not unit.uses and not unit.running and not self.double_backward and not unit.awaits_trigger:
                    self.reshard(unit)

    def values_changed(self) -> None:
        """Forget unsharded parameters, and graphs over them, because the shards were edited between steps."""
        self.double_backward = False
        for unit in self.gathered.values():
            unit.uses.clear()
            unit.kept.clear()
        for unit in self.units.values():
            unit.drop_secondary_shards()
        for unit in self.units.values() if self.keeps_on else ():
            # `unit.is_stale()` would not do: this rank's shard may have no part of a parameter that was edited.
            unit.outdated |= any(param.requires_grad for param in unit.params)
        self.reshard_unused()
