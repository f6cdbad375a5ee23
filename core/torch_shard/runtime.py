"""When units are gathered, released and reduced: hooks, recorded order, prefetch, the end of a backward.

Forward.   A pre-hook on a unit's trigger modules gathers it and installs its leaves; the forward hook puts the sharded
           parameters back. A unit is released when *another* unit's forward begins: a unit with several triggers is
           not gathered twice, and the unit used last is still there when backward starts with it.
Backward.  A hook on the outputs gathers again what autograd kept something of. Autograd runs the nodes of one device in
           falling order of their sequence number, so when the trigger of a unit fires, every node made after the
           beginning of a later unit's forward has run: that later unit is released. This needs no identity function on
           the inputs (which would make in-place operations on them an error) and covers frozen weights and LoRA,
           where gradients of parameters say nothing about who is still needed.
Order.     Every gather is an event of a sequence that all ranks must share. The successor of each pair of events is
           remembered; gathers that follow it are prefetched. A gather that memory did not predict is first agreed upon
           with the other ranks, so ranks that part ways find out before their collectives mix.
Reduction. See :mod:`.reductions`.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from typing import Any

import torch
from torch import nn

from .agreement import Agreement
from .buffers import BufferSync
from .collectives import Collectives
from .config import ShardConfig
from .errors import ShardError, ShardPicklingError, UnitStateError
from .flat_buffer import FlatBuffer
from .leaf import own_grad, set_own_grad
from .on_demand import OnDemand
from .order import BACKWARD, EVALUATION, FORWARD, PHASES, Event, GatherOrder
from .outputs import own_memory, tensors_in
from .reductions import PAUSE, Reductions
from .registrations import Registrations
from .together import over
from .unit import State, Unit
from .use import Check, EndOfBackward, EndOfNested, Trigger, Use, graph_task, sequence_number


class Runtime:
    """Decides when; one for each sharded model."""

    def __init__(self, config: ShardConfig, collectives: Collectives) -> None:
        self.config, self.collectives = config, collectives
        self.units: list[Unit] = []
        self.by_index: dict[int, Unit] = {}  # a copy of a submodule has some of the indices only
        self.buffers: BufferSync | None = None
        self.agreement: Agreement | None = None
        self.require_sync = True
        self.depth = 0  # trigger forwards running
        self.session = False  # a forward has begun since the last backward ended
        self.fresh = False  # no unit has been gathered in this session yet
        self.roots = 0  # forwards of the root module running
        self.frames: list[tuple[Unit, Use, bool]] = []
        self.on_demand = OnDemand(self)
        self.idle: dict[int, Unit] = {}  # gathered (or being gathered) units by index
        self.gathers = GatherOrder()
        self.fresh_backward = False  # no unit has been gathered in this backward yet
        self.passed: set[int] = set()  # units gathered in this backward for other ranks' sake
        self.needed: set[int] = set()  # units whose backward has begun on this rank
        self.solo = 0  # inside gathered(ranks=...): a forward here is this rank's own affair
        self.forward_order: dict[int, Unit] = {}
        self.forward_sync = True
        self.end: weakref.ref[EndOfBackward] | None = None
        self.tasks: set[int] = set()
        self.syncing = True
        self.reductions = Reductions(collectives, self.note_issued)
        channel = collectives.gather_channel
        self.together = over(channel.groups) if channel is not None else None
        self.number = 0  # among the engines over these groups
        self.checked = False  # held gradients were looked at before the running backward
        self.double_backward = False  # a graph of gradients exists that reads gathered values
        self.creating = False  # the running backward makes one
        self.registrations = Registrations()

    def add(self, unit: Unit) -> None:
        unit.runtime = self
        self.units.append(unit)
        self.units.sort(key=lambda u: u.index)
        self.by_index[unit.index] = unit
        if self.agreement is not None:
            self.agreement.width = self._width()

    def ready(self) -> None:
        self.agreement = Agreement(self.collectives, self._width())
        # Ranks that have differed remember different orders.
        self.agreement.on_difference = self.gathers.forget

    def _width(self) -> int:
        return sum(2 + len(u.params) for u in self.units)

    def __deepcopy__(self, memo: dict[int, Any]) -> Runtime:
        other = Runtime(self.config, self.collectives)
        memo[id(self)] = other
        other.ready()
        if self.buffers is not None:
            other.buffers = copy.deepcopy(self.buffers, memo)
        other.registrations.ignored = self.registrations.ignored
        return other

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ShardPicklingError(
            f"rank {self.collectives.world_rank}: a sharded model can't be pickled (torch.save(model)), since each rank holds "
            'slices only. Save engine.state_dict(form="full") instead, called on all ranks.'
        )

    # -- forward ------------------------------------------------------------------------------------------------
    def enter(self, unit: Unit) -> None:
        """Before the forward of a module that triggers `unit`."""
        if unit.is_summoned:
            self.frames.append((unit, Use(unit, sequence_number()), True))
            return
        if self.registrations.changed:
            self.check_registrations()
        in_backward = graph_task() != -1
        start = sequence_number()
        self.demand(unit, self.phase())
        if in_backward and not unit.uses:
            # Recomputation of a checkpointed region that spans several units: the nodes that will read these values are
            # older than the ones being made now, so only this unit's own trigger may start the countdown to release.
            unit.held = True
        unit.install()
        unit.running += 1
        self.depth += 1
        self.frames.append((unit, Use(unit, start), False))

    def exit(self, unit: Unit, outputs: Any) -> Any:
        """After that forward, also when it raised (`outputs` is None then). Returns what the module shall return."""
        if not any(owner is unit for owner, _, _ in self.frames):
            return outputs  # the pre-hook itself failed
        while True:
            owner, use, summoned = self.frames.pop()
            if not summoned:
                self.depth -= 1
                owner.running -= 1
                owner.uninstall()
            if owner is unit:  # frames above it were left by an interrupt that skipped their hooks
                break
        recording = torch.is_grad_enabled() and outputs is not None
        if summoned:
            if recording and all(s.in_place for s in unit.summons):
                self.watch_outputs(use, outputs)
            return outputs
        if unit.sharded and outputs is not None:
            outputs = own_memory(outputs, {f.storage for f in unit.flats})
        if recording:
            self.watch_outputs(use, outputs)
        self.on_demand.check_copies()
        if not torch.is_grad_enabled():
            self.between_forwards()
        return outputs

    def between_forwards(self) -> None:
        """Nothing of a forward without gradients is needed later, except what is already on its way."""
        if self.in_forward or graph_task() != -1:
            return
        for unit in list(self.idle.values()):
            if unit.state is State.FULL and not unit.running and not unit.uses and not self._keeps():
                self._release(unit)

    def watch_outputs(self, use: Use, outputs: Any, forward: bool = True) -> None:
        """Have backward come back to `use`, a module's forward or one operation, through the tensors it made."""
        unit = use.unit
        # A leaf that comes back is an input, which backward reaches when it has left the unit.
        found = [t for t in tensors_in(outputs) if t.requires_grad and not t.is_leaf]
        use.end = sequence_number()
        use.saved = unit.is_referenced()
        if use.saved:
            use.remember()
            found += unit.kept_tensors() if forward else []
        # An in-place operation on a view replaces its node, and the hook with it; the base's node stays.
        for base in [t._base for t in found]:
            if base is not None and base.requires_grad and not base.is_leaf:
                found.append(base)
        if not unit.sharded:
            if use.versions:
                for tensor in found:
                    tensor.register_hook(Check(use))
            return
        trigger = Trigger(self, use)
        for tensor in found:
            tensor.register_hook(trigger)
        if use.saved and (not found or (forward and unit.is_held_by_python())):
            # Nothing to hook, or a leaf was put aside for later: keep it until backward ends.
            kept = copy.copy(use)
            kept.start = -1
            unit.uses.append(kept)

    @property
    def in_forward(self) -> bool:
        """Whether a forward of the model or of one of its units is running."""
        return self.depth > 0 or self.roots > 0

    def begin(self, root: nn.Module) -> None:
        """Before the root module's forward."""
        self.roots += 1
        if self.registrations.changed or self.registrations.root is None:
            self.registrations.root = weakref.ref(root)
            self.check_registrations()
        if self.depth == 0 and self.roots == 1 and graph_task() == -1:
            self.session = False
            self.sweep_stale()
            if self.buffers is not None and self.buffers.due and not self.solo:
                assert self.agreement is not None
                self.agreement.note(*self.buffers.signature(root))
                self._open_session()
                self.buffers.synchronise(root)

    def check_registrations(self) -> None:
        """Raise if a parameter was added since sharding."""
        leaves = [leaf for u in self.units for f in u.flats for leaf in f.leaves]
        self.registrations.check(self, leaves)

    def finish(self) -> None:
        """After the root module's forward."""
        self.roots = max(0, self.roots - 1)
        if self.buffers is not None and not self.solo:
            self.buffers.due = torch.is_grad_enabled() and self.require_sync
        if self.depth == 0 and graph_task() == -1:
            self.session = False
            if not torch.is_grad_enabled():
                self.sweep_stale()

    def sweep_stale(self) -> None:
        """Release whatever no running forward and no begun backward needs."""
        for unit in list(self.idle.values()):
            if not unit.running and not unit.uses and not unit.is_summoned and not self.double_backward:
                self._release(unit)

    def phase(self) -> int:
        if graph_task() != -1:
            return BACKWARD
        return FORWARD if torch.is_grad_enabled() else EVALUATION

    def _keeps(self) -> bool:
        return self.config.strategy == "shard_grad_op" and torch.is_grad_enabled()

    def _open_session(self) -> None:
        if self.session or self.collectives.world == 1:
            return
        self.session = self.fresh = True
        if self.together is not None and not self.number:
            self.number = self.together.number()
        assert self.agreement is not None
        code = 1 + (1 if torch.is_grad_enabled() else 0)
        self.agreement.note(code, "begins a " + PHASES[0 if torch.is_grad_enabled() else 1])
        self.agreement.check("the start of a forward")

    # -- gathering in one order ---------------------------------------------------------------------------------
    def demand(self, unit: Unit, phase: int) -> None:
        """Have `unit` gathered when this returns, and the next ones on their way. Collective."""
        if phase != BACKWARD:
            self._open_session()
            first = self.fresh
            if phase == FORWARD:
                self.forward_sync = self.require_sync
                self.forward_order.pop(unit.index, None)
                self.forward_order[unit.index] = unit
        else:
            first = self.fresh_backward
        if not unit.sharded:
            return
        if phase == BACKWARD:
            self.fresh_backward = False
        else:
            self.fresh = False
        event: Event = (phase, unit.index, first)
        repeated = self.gathers.repeats(event)
        if not repeated:
            self._follow(unit, event)
        idle = unit.state is not State.SHARDED and phase != BACKWARD and not unit.running
        if idle and all(u.start == -1 for u in unit.uses) and unit.is_stale():
            unit.release()
        if not repeated and phase != BACKWARD and not self._keeps():
            self._release_others(unit)
        if unit.state is State.SHARDED:
            unit.gather()
        self.idle[unit.index] = unit
        unit.wait()
        if not repeated:
            self._prefetch()

    def _follow(self, unit: Unit, event: Event) -> None:
        assert self.agreement is not None
        if event[0] == BACKWARD and not event[2]:
            self._pass_over(event)
        self._note(event)
        if not self.gathers.advance(event):
            self.agreement.check(f"the agreement to gather unit {unit.name!r}, which did not follow here before")

    def _note(self, event: Event) -> None:
        assert self.agreement is not None
        text = f"gathers unit {self.by_index[event[1]].name!r} in {PHASES[event[0]]}"
        self.agreement.note(event[0] * 1_000_003 + event[1] + 17, text)

    def _pass_over(self, until: Event | None) -> None:
        """A part of the model may be in the loss of some ranks only. Where the remembered order of a backward comes to
        `until` (None: to its end), this rank takes part in the gathers on the way, for the ranks that need them."""
        for event in self.gathers.between(until, len(self.units)):
            unit = self.by_index[event[1]]
            self._note(event)
            self.gathers.advance(event)
            unit.gather()
            self.idle[unit.index] = unit
            self.passed.add(unit.index)

    def _upcoming(self) -> list[Unit]:
        return [self.by_index[i] for i in self.gathers.upcoming(self.config.prefetch)]

    def _prefetch(self) -> None:
        for unit in self._upcoming():
            if unit.state is State.SHARDED:
                unit.gather()
                self.idle[unit.index] = unit

    def _release_others(self, unit: Unit) -> None:
        upcoming = self._upcoming()
        for other in list(self.idle.values()):
            if other is unit or other.running or other.uses or other.is_summoned or self.double_backward:
                continue
            if other not in upcoming:
                self._release(other)

    def _release(self, unit: Unit) -> None:
        unit.release()
        self.idle.pop(unit.index, None)

    # -- backward -----------------------------------------------------------------------------------------------
    def trigger(self, use: Use) -> None:
        """The gradient of an output of `use` has arrived: backward of that unit begins."""
        self.arm()
        unit = use.unit
        if unit.is_summoned:
            return
        if torch.is_grad_enabled():  # create_graph: the new graph needs the values once more
            self.double_backward = self.creating = True
        if use not in unit.uses:
            use.check()
            use.task = graph_task()
            unit.uses.append(use)
            unit.held = False
            self._sweep(use)
        if use.saved:
            self.needed.add(unit.index)
            self.demand(unit, BACKWARD)
        else:
            unit.wait()  # another use of the unit may have made a prefetch of it that nobody waits for

    def _sweep(self, use: Use) -> None:
        """Release the units whose nodes have all run: their forwards began after that of `use` ended."""
        if self.double_backward or self.config.strategy == "shard_grad_op":
            return
        for unit in list(self.idle.values()):
            if unit is use.unit or unit.running or unit.held:
                continue
            if not unit.uses:
                if unit.index in self.passed and unit.state is State.FULL:
                    self._release(unit)
                continue
            if all(u.start >= use.end and u.task == use.task for u in unit.uses):
                unit.uses.clear()
                self._release(unit)

    def before_backward(self) -> None:
        """Before `torch.autograd.backward`: what changed in held gradients up to now was done by the user."""
        for unit in self.units:
            for flat in unit.flats:
                flat.check_held()
        self.checked = True

    def after_backward(self) -> None:
        self.checked = False
        for unit in self.units:
            for flat in unit.flats:
                flat.keep_held()

    def holds_gradients(self) -> bool:
        """Whether something waits for its reduction, or was lost while it did."""
        return any(flat.grad is not None or flat.lost for unit in self.units for flat in unit.flats)

    def arm(self) -> None:
        """Have `EndOfBackward` called when the running graph task ends."""
        task = graph_task()
        if task in self.tasks:
            return
        if self.end is not None and self.end() is not None:
            if task != -1:  # nested: reentrant checkpointing runs a backward inside the backward
                self.tasks.add(task)
                torch.autograd.Variable._execution_engine.queue_callback(EndOfNested(self, task))
            return
        for unit in self.units:
            unit.rounds = 0
            for use in unit.uses:
                use.check()
            for flat in unit.flats:
                flat.begin_backward(self.checked)
        self.fresh_backward = True
        self.passed.clear()
        self.needed.clear()
        self.tasks = {task}
        self.creating = torch.is_grad_enabled()
        self.double_backward |= self.creating
        self.syncing = self.forward_sync
        self.reductions.begin(self.forward_order.values())
        if self.together is not None:
            self.together.begin(self)
        end = EndOfBackward(self)
        self.end = weakref.ref(end, lambda _: self._abandon())
        torch.autograd.Variable._execution_engine.queue_callback(end)

    def on_grad(self, unit: Unit, flat: FlatBuffer, index: int, leaf: torch.Tensor) -> None:
        """A leaf's gradient is complete: move it into the unit's buffer and free it."""
        self.arm()
        # A unit that this use saved nothing of is not waited for: it may be on its way for an earlier use.
        if unit.state is State.GATHERING and not unit.uses:
            raise UnitStateError(
                f"rank {self.collectives.world_rank}: a gradient of {flat.layout.slots[index].name} arrived while unit "
                f"{unit.name!r} was still being gathered; backward reached it without its trigger."
            )
        grad = own_grad(leaf)
        set_own_grad(leaf, None)
        if grad is None:
            return
        if grad.is_sparse:
            raise ShardError(
                f"rank {self.collectives.world_rank}: {flat.layout.slots[index].name} received a sparse gradient, which "
                "can't be sharded; build the embedding with sparse=False."
            )
        if grad.requires_grad:
            raise ShardError(
                f"rank {self.collectives.world_rank}: backward(create_graph=True) reached {flat.layout.slots[index].name}; the "
                "reduced .grad has no graph, so what is computed from it would lack its gradient. Use "
                "torch.autograd.grad(loss, parameters, create_graph=True), whose results have one."
            )
        if flat.frozen[index]:  # since the forward
            return
        flat.accept(index, grad, 1.0 / self.collectives.world)
        if self.syncing and unit.rounds == 0:
            self.reductions.advance()

    def end_nested(self, task: int) -> None:
        for unit in list(self.idle.values()):
            if any(u.task == task for u in unit.uses):
                unit.uses = [u for u in unit.uses if u.task != task]
                if not unit.uses and not unit.running and not self.double_backward and not unit.held:
                    self._release(unit)

    def end_backward(self) -> None:
        """The last node has run: compare with the other ranks, reduce what is left, publish `.grad`."""
        self.end = None
        self.tasks = set()
        try:
            if self.gathers.phase == BACKWARD and not self.fresh_backward:
                self._pass_over(None)
            if self.syncing:
                assert self.agreement is not None
                if self.reductions.flush(self.units, self.agreement, self.passed - self.needed):
                    self.gathers.forget()  # no rank needs it in backward any more: learn the order anew
            else:
                for unit in self.units:
                    for flat in unit.flats:
                        flat.show_held()
            self._compare_order()
        except BaseException:
            self._abandon()
            raise
        keep = self.double_backward = self.creating
        for unit in self.units:
            unit.held = False
            unit.uses.clear()
        if not keep:
            for unit in list(self.idle.values()):
                if not unit.running and not unit.is_summoned:
                    self._release(unit)
        self.collectives.drop_spares()  # memory between steps counts; a backward takes them up again
        if self.syncing:
            self.forward_order.clear()
            if not self.depth:
                self.session = False

    def note_issued(self, kind: str, unit: Unit) -> None:
        if self.together is not None:
            self.together.note(kind, self.number, unit.index)

    def _compare_order(self) -> None:
        """Where the backward ran through several engines: were their collectives in one order?"""
        issued = self.together.end(self) if self.together is not None else None
        if issued is not None:
            assert self.agreement is not None
            self.agreement.note(issued, f"has mixed the collectives of several models in the order {issued:x}")
            self.agreement.check("the end of a backward through several models")

    def _abandon(self) -> None:
        """Backward ended with an exception: leave the engine as it was before it."""
        if self.together is not None:
            self.together.end(self)
        self.end, self.tasks = None, set()
        self.reductions.abandon()
        self.double_backward = False
        for unit in self.units:
            unit.uses.clear()
            unit.held = False
            for flat in unit.flats:
                flat.forget()
            if unit.state is not State.SHARDED and unit.sharded and not unit.running and not unit.is_summoned:
                with contextlib.suppress(ShardError):
                    if all(p.settle(PAUSE) for p in unit.pending):
                        self._release(unit)
                if unit.state is State.GATHERING:
                    # Its gather may never end; the memory stays, since the collective may still write to it.
                    unit.pending, unit.state = [], State.SHARDED
        self.forward_order.clear()
        self.session = False

    # -- between steps ------------------------------------------------------------------------------------------
    def parameters_changed(self) -> None:
        """The shards were edited (an optimizer step, `p.mul_`): gathered copies and graphs over them are out of date."""
        if graph_task() != -1 or self.depth:
            return
        self.double_backward = False
        for unit in list(self.idle.values()):
            unit.uses.clear()
        self.sweep_stale()
