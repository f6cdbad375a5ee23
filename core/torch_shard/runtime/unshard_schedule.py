"""Which units are gathered when: in one order on all ranks, prefetched along the remembered one, released after use.

Every gather is an event of a sequence that all ranks must share (:mod:`.gather_order`). What memory predicts is prefetched. A
gather that it did not predict is first agreed upon with the other ranks, so ranks that part ways find out before their
collectives mix.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..comm.divergence import Agreement
from ..config.shard_config import ShardConfig
from ..unit.phases import BACKWARD, FORWARD
from ..unit.unit import State, Unit
from .gather_order import Event, GatherOrder

if TYPE_CHECKING:
    from .backward_hooks import Use


class Schedule:
    """The gathers and releases of one sharded model. `by_index` are its units, those added later too."""

    def __init__(self, config: ShardConfig, by_index: dict[int, Unit], replicated: bool) -> None:
        self.by_index = by_index
        self.order = GatherOrder(config.prefetch)
        self.agreement: Agreement | None = None
        self.gathered: dict[int, Unit] = {}  # units that are whole, or on their way, by index
        self.fresh = False  # no unit has been gathered yet in this forward
        self.fresh_backward = False  # ... in this backward
        self.passed: set[int] = set()  # units gathered in this backward for other ranks' sake
        self.needed: set[int] = set()  # units whose backward has begun on this rank
        self.double_backward = False  # a graph of gradients exists that reads gathered values: nothing is released
        self._keeps_forward = not config.reshards  # from forward to the end of backward
        self.keeps_on = config.strategy == "shard_optim"  # until the parameters change
        # Parameters of which every rank has all: gathering is a cast, and no other rank's affair.
        self._replicated = replicated

    def _keeps(self) -> bool:
        return self.keeps_on or (self._keeps_forward and torch.is_grad_enabled())

    def begin_backward(self) -> None:
        self.fresh_backward = True
        self.passed.clear()
        self.needed.clear()

    # -- gathering ----------------------------------------------------------------------------------------------
    def demand(self, unit: Unit, phase: int) -> None:
        """Have `unit` gathered when this returns, and the next ones on their way. Collective."""
        if self._replicated:
            if unit.state is State.FULL and not unit.running and not unit.uses and unit.is_stale():
                unit.release()
            self._gather(unit, phase)
            unit.wait()
            unit.note_stream()
            return
        idle = unit.state is not State.SHARDED and not unit.running and not unit.uses
        # What is stale here was edited since the forward began, when the ranks compared, so by code that all of them run.
        edited = idle and phase != BACKWARD and unit.is_stale()
        if self.keeps_on and self._is_current(unit) and not edited:
            self.gathered[unit.index] = unit
            unit.wait()
            unit.note_stream()
            return
        if phase == BACKWARD:
            first, self.fresh_backward = self.fresh_backward, False
            self.needed.add(unit.index)
        else:
            first, self.fresh = self.fresh, False
        event: Event = (phase, unit.index, first)
        upcoming = None
        if not self.order.repeats(event):
            self._follow(unit, event)
            upcoming = [self.by_index[i] for i in self.order.upcoming()]
        if phase != BACKWARD:
            if edited or (idle and unit.outdated):
                unit.release()
            if upcoming is not None and not self._keeps():
                self._release_others(unit, upcoming, for_backward=phase == FORWARD)
        self._gather(unit, phase)
        unit.wait()
        unit.note_stream()
        for other in upcoming or ():
            self._gather(other, phase)

    def _gather(self, unit: Unit, phase: int) -> None:
        if unit.state is State.SHARDED or unit.refill:
            if phase != BACKWARD:
                unit.drop_parts()
            unit.gather(again=phase == BACKWARD)
        self.gathered[unit.index] = unit

    def _follow(self, unit: Unit, event: Event) -> None:
        if event[0] == BACKWARD and not event[2]:
            self.pass_over(event)
        self._note(event)
        if not self.order.advance(event):
            assert self.agreement is not None
            self.agreement.check(f"the agreement to gather unit {unit.name!r}, which did not follow here before")

    def _note(self, event: Event) -> None:
        assert self.agreement is not None
        phase, index, _ = event
        self.agreement.note(phase * 1_000_003 + index + 17, self.by_index[index].event_texts[phase])

    def pass_over(self, until: Event | None) -> None:
        """A part of the model may be in the loss of some ranks only. Where the remembered order of a backward comes to
        `until` (None: to its end), this rank takes part in the gathers on the way, for the ranks that need them."""
        for event in self.order.between(until, len(self.by_index)):
            unit = self.by_index[event[1]]
            self._note(event)
            self.order.advance(event)
            self._gather(unit, BACKWARD)
            self.passed.add(unit.index)

    def end_backward(self) -> None:
        """The last node has run on this rank."""
        if self.order.phase == BACKWARD and not self.fresh_backward:
            self.pass_over(None)

    # -- releasing ----------------------------------------------------------------------------------------------
    @staticmethod
    def _is_current(unit: Unit) -> bool:
        # Not whether this rank's own shard was written to: all ranks must come to one answer (`agree_on_changes`).
        return unit.state is not State.SHARDED and not unit.refill and not unit.outdated

    def agree_on_changes(self, what: str) -> bool:
        """Under ``shard_optim``, where a forward begins: compare the ranks' sequences, and forget what is gathered of units that
        any rank has seen changed, or may have changed unseen. Collective; False where other strategies do nothing."""
        if not self.keeps_on:
            return False
        units = list(self.by_index.values())
        marks = [unit.outdated or unit.exposed or unit.is_stale() for unit in units]
        assert self.agreement is not None
        agreed = self.agreement.check(what, torch.tensor(marks, dtype=torch.uint8))
        for unit, changed in zip(units, marks if agreed is None else agreed.tolist(), strict=True):
            unit.outdated = bool(changed)
        return True

    def release(self, unit: Unit, for_backward: bool = False) -> None:
        """Release a unit, or where something that this rank put aside may still need it, take part in its next gather."""
        if self.keeps_on and self._is_current(unit):
            return
        if unit.kept:
            unit.refill = True
            # The other ranks will gather it from what few of them have kept; here that is the whole.
            if for_backward:
                unit.note_resharded()
            return
        unit.release(for_backward)
        self.gathered.pop(unit.index, None)

    def _release_others(self, unit: Unit, upcoming: list[Unit], for_backward: bool) -> None:
        if self.double_backward:
            return
        for other in list(self.gathered.values()):
            if other is unit or other.running or other.uses or other.is_summoned or other in upcoming:
                continue
            self.release(other, for_backward)

    def release_unused(self) -> None:
        """Release whatever no running forward and no begun backward needs."""
        if self.double_backward:
            return
        for unit in list(self.gathered.values()):
            if not unit.running and not unit.uses and not unit.is_summoned:
                self.release(unit)

    def release_whole(self) -> None:
        """After a forward without gradients: nothing of it is needed later, except what is already on its way."""
        for unit in list(self.gathered.values()):
            if unit.state is State.FULL and not unit.running and not unit.uses and not self._keeps():
                self.release(unit)

    def release_behind(self, use: Use) -> None:
        """Backward has come to `use`: release the units whose nodes have all run, since their forwards began after its
        end."""
        if self.double_backward or self._keeps_forward:
            return
        for unit in list(self.gathered.values()):
            if unit is use.unit or unit.running or unit.held:
                continue
            if not unit.uses:
                if unit.index in self.passed and unit.state is State.FULL:
                    self.release(unit)
            elif all(u.start >= use.end and u.task == use.task for u in unit.uses):
                unit.uses.clear()
                self.release(unit)

    def end_nested(self, task: int) -> None:
        """A backward inside the backward has ended."""
        for unit in list(self.gathered.values()):
            if any(u.task == task for u in unit.uses):
                unit.uses = [u for u in unit.uses if u.task != task]
                if not unit.uses and not unit.running and not self.double_backward and not unit.held:
                    self.release(unit)

    def values_changed(self) -> None:
        """The shards were edited between steps: gathered copies, and graphs over them, are out of date."""
        self.double_backward = False
        for unit in self.gathered.values():
            unit.uses.clear()
            unit.kept.clear()
        for unit in self.by_index.values():
            unit.drop_parts()
        for unit in self.by_index.values() if self.keeps_on else ():
            # Whether this rank's own shard was written to says nothing: it may have no part of what was.
            unit.outdated |= any(param.requires_grad for param in unit.params)
        self.release_unused()
