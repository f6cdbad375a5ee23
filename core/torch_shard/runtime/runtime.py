"""A sharded model's forwards and backwards, as its hooks see them.

Forward.   The forward of a unit leaves hooks on its outputs. See :mod:`.forward_hooks`.
Backward.  A hook on the outputs, the *trigger*, unshards the unit if autograd has saved some of its parameters. Autograd
           runs the nodes of one device in falling order of their sequence number. So when the trigger of a unit fires, all
           nodes have run that later forwards have made, and the units of these forwards are resharded. This needs no
           identity function on the inputs, which would make in-place operations on them an error. It also covers frozen
           weights and LoRA, where gradients of parameters don't tell which units are still needed.

:mod:`.unshard_schedule` decides on unshards, their order and prefetch, :mod:`.reduce_schedule` on reductions.
"""

from __future__ import annotations

import contextlib
import copy
import functools
import weakref
import zlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..comm.collectives import Collectives
from ..comm.divergence import OperationSequence
from ..comm.one_sided.partners import ModelVersion
from ..comm.one_sided.versions import Versions
from ..comm.process_groups import group_timeout
from ..comm.traffic_statistics import GatheredBytes
from ..comm.work import caller_line
from ..config.shard_config import ShardConfig
from ..errors import ConfigError, ShardError, ShardPicklingError, UnitStateError
from ..plan.matrix_owners import OwnerMaps
from ..unit.flat_buffer import FlatBuffer
from ..unit.phases import BACKWARD, EVALUATION, FORWARD, PHASES
from ..unit.unit import State, Unit
from ..utils.autograd_private import graph_task, sequence_number
from . import grad_scaler
from .buffer_sync import BufferSync
from .forward_hooks import Forwards
from .lone_reads import LoneReads
from .on_demand import OnDemand
from .optimizer_states import OptimizerStates
from .reduce_schedule import PAUSE, ReduceSchedule
from .replaced_params import Registrations
from .served_shards import ServedShards
from .unshard_schedule import UnshardSchedule
from .use import Use

if TYPE_CHECKING:
    from ..comm.one_sided.partners import Reading
    from ..comm.one_sided.service import Service
    from ..offload.host import Host
    from .ports import StepInBackward


class Runtime:
    """Decides when units are unsharded, resharded and reduced; one for each sharded model."""

    def __init__(self, config: ShardConfig, collectives: Collectives, host: Host | None = None) -> None:
        """Make a runtime without units.

        `host` is the host memory that holds parameters and optimizer state; None where these are on the device.
        """
        self.config, self.collectives, self.host = config, collectives, host
        if host is not None:
            host.users.add(self)
        self.units: list[Unit] = []
        self.gathered_bytes = GatheredBytes()
        self.buffers: BufferSync | None = None
        channel = collectives.gather_channel
        self.engine_order = channel.groups.engine_order if channel is not None else None
        # This rank's sequence of operations, which the ranks compare. Its `number` identifies the engine among those over the
        # same groups; it is 0 for a deep copy before its first forward.
        self.operations = OperationSequence(collectives, self.engine_order)
        self.require_sync = True
        self.reduces_each = False  # each backward reduces, also while `require_sync` is False: no_sync(hold=False)
        self.forwards = Forwards(self)
        self.is_ready = False  # set-up has ended
        self.session = False  # the ranks have agreed on a forward, and no backward has ended since
        self._noted: Sequence[tuple[int, str]] = ()  # when they agreed on the latest forward
        self.session_before = False  # what `session` was before the read that runs now
        self.reshards_first = False  # the session that opens next begins with resharding all units that nothing needs
        self.on_demand = OnDemand(self)
        # Of the shards.
        timeout, alone = group_timeout(collectives.device), config.alone != "error" and collectives.world > 1
        self.versions = Versions(collectives.device, collectives.world_rank, timeout, alone)
        if channel is not None:
            self.versions.settle = functools.partial(channel.groups.comparisons.settle, collectives.watchdog.timeout)
        # The load that has to follow makes the versions equal again.
        self.operations.on_unlike_loads = self.versions.restart
        self.lone = LoneReads(self)
        self.optimizer_states = OptimizerStates(self)
        self.served = ServedShards(self.versions)
        self.schedule = UnshardSchedule(config, collectives, self.operations, self.lone)
        self.key = ""  # the name of the model among those over the same groups, on all ranks
        self.solo = 0  # depth of gathered(ranks=...), inside which a forward concerns this rank alone
        self.forward_order: dict[int, Unit] = {}  # units in the order of their first use in forward
        self.forward_sync = True  # `require_sync` at the last forward
        self.forward_reduces = False  # `reduces_each` at the last forward
        self.end: weakref.ref[Any] | None = None  # the callback at the end of the running backward
        self.state_dict_settings: Any = None  # see torch_shard.state_dict_type
        self.tasks: set[int] = set()  # the autograd graph tasks of the running backward: its own, and nested ones
        self.syncing = True  # the running backward reduces
        self.reductions = ReduceSchedule(self)
        self.awaits_votes = (
            False  # gradients were published before the ranks have compared what the backward has reduced
        )
        self.original = 0  # the number of the engine that this one is a copy of
        self.copied_from: ModelVersion | None = None
        self.checked = False  # deferred gradients were checked before the running backward
        self.refusal: ShardError | None = None  # the error of that check, raised if the backward comes to this engine
        self.creating = False  # the running backward makes a graph of gradients, which reads unsharded parameters
        self.registrations = Registrations()
        self.owners = OwnerMaps()  # of optimizers that step on full matrices
        self.in_backward: StepInBackward | None = None  # the optimizer that steps during backward
        self.steps: weakref.ref[Any] | None = None  # watches optimizers' steps, once there is an engine
        quantized = config.quantized
        # Error feedback carries residuals from one step to the next. A scaler changes their scale, and skips steps.
        self.feeds_back = quantized is not None and quantized.gradients is not None and quantized.error_feedback
        if self.feeds_back:
            grad_scaler.follow()

    def add(self, unit: Unit) -> None:
        """Add `unit` to the units of this runtime."""
        self.units.append(unit)
        self.units.sort(key=lambda u: u.index)
        self.schedule.units[unit.index] = unit
        self.served.flats[unit.index] = unit.flats

    @property
    def flats(self) -> list[FlatBuffer]:
        """The flat buffers of all units."""
        return [flat for unit in self.units for flat in unit.flats]

    def ready(self) -> None:
        """Prepare to compare sequences with the other ranks; call when all units are added."""
        self.is_ready = True
        if self.engine_order is not None:
            self.engine_order.join(self)
            self.engine_order.widen(2 + sum(4 + len(u.params) for u in self.units))

    def number_as_new(self) -> None:
        """Take a number for this engine. Call on all ranks, for all engines in one order."""
        self.versions.restart()  # ranks that began on meta have changed shards that others were given
        if self.engine_order is not None:
            self.operations.number = self.engine_order.number()
            self._offer(f"{self.operations.number}")

    def _offer(self, key: str) -> None:
        """Hand out this rank's shards to ranks that read alone, under `key`."""
        self.key = key
        if self.service is not None:
            self.served.offer(self.service, key)

    def sources(self) -> list[ModelVersion]:
        """Return the versions from which the values of this model can be read, the best one first.

        A deep copy may have been made by this rank alone; until it is changed, its original has its values. Edits may have been
        made by this rank alone; where it knows their values in full, the other ranks have all others.
        """
        versions, edits = self.versions, self.versions.edits
        own = edits.known()
        digest = edits.digest if own is None else edits.base
        found = ModelVersion(self.key, versions.finished, digest, versions.line, own or {})
        return [found] if self.copied_from is None or versions.changed else [self.copied_from, found]

    @property
    def service(self) -> Service | None:
        """What hands out this rank's shards to ranks that read alone; None where there is nobody."""
        return self.collectives.service

    def meet(
        self,
        what: str,
        notes: Sequence[tuple[int, str]],
        payload: torch.Tensor | None = None,
        sure: bool = False,
        alone: bool = True,
    ) -> torch.Tensor | None:
        """Compare the ranks' operations before one that only reads; None if this rank reads alone; see :class:`.LoneReads`."""
        if not alone:
            self.lone.refuse(what)
        return self.lone.meet(what, notes, payload, sure, alone)

    @property
    def reading(self) -> Reading | None:
        """The running read of the model by this rank alone."""
        return self.lone.reading

    def __deepcopy__(self, memo: dict[int, Any]) -> Runtime:
        other = Runtime(self.config, self.collectives, self.host)
        memo[id(self)] = other
        other.ready()
        other.original = self.operations.number or self.original
        source = other.copied_from = self.sources()[0]
        if self.engine_order is not None:
            place = self.engine_order.place_of_copy(other.original, caller_line())
            other._offer(f"{source.key} after {source.finished} changes, copied at {place}")
        if self.buffers is not None:
            other.buffers = copy.deepcopy(self.buffers, memo)
        other.reductions.hook = self.reductions.hook
        other.registrations.ignored = self.registrations.ignored
        return other

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ShardPicklingError(
            f"rank {self.collectives.world_rank}: a sharded model can't be pickled (torch.save(model)), since each rank holds "
            f"shards only. {self.collectives.watchdog.saving_advice}"
        )

    # -- what units ask -----------------------------------------------------------------------------------------
    @property
    def in_forward(self) -> bool:
        """True if a forward of the model or of one of its units is running."""
        return self.forwards.running

    def await_votes(self) -> None:
        """Learn what the ranks have reduced in the latest backward. Call before gradients are read or changed. Collective."""
        if self.awaits_votes:
            self.operations.finish()

    def check_grad_reader(self) -> None:
        """Raise if `.grad` is read that an optimizer's step in backward has consumed."""
        if self.in_backward is not None:
            self.in_backward.check_reader()

    def leave_interrupted(self) -> None:
        """Do what the forward hooks would have done that an interrupt has skipped. Not collective."""
        self.forwards.leave_interrupted()

    # -- forward ------------------------------------------------------------------------------------------------
    def watch_outputs(self, use: Use, outputs: list[torch.Tensor], forward: bool = True) -> None:
        """Hook the outputs of `use`, a module's forward or one operation, so that backward triggers its unit."""
        unit = use.unit
        # An output that is a leaf is an input passed through, which backward reaches when it has left the unit.
        found = [t for t in outputs if t.requires_grad and not t.is_leaf]
        use.end = sequence_number()
        use.saved, use.versions, by_python = unit.references()
        if use.saved and forward:
            found += unit.kept_tensors()
        # An in-place operation on a view replaces its node, and the hook with it; the base's node stays.
        found += [base for t in found if (base := t._base) is not None and base.requires_grad and not base.is_leaf]
        if self.in_backward is not None and found:
            self.in_backward.expect(use)
        # Deferred gradients have to be reduced also by a backward in which no parameter of the unit gets a gradient.
        if unit.gathers or use.versions or self.in_backward is not None or unit.holds_gradients():
            trigger = functools.partial(self.trigger, use)
            for tensor in found:
                tensor.register_hook(trigger)
        if unit.gathers and use.saved and (not found or (forward and (by_python or _newer_nodes(found, use.end)))):
            # Backward may reach this use without its trigger. There is no tensor to hook, or the user has put an unsharded
            # parameter aside, or a later tensor than those found has left the forward some other way. So the unit stays
            # unsharded until backward ends.
            unit.kept.append(use)

    def check_registrations(self) -> None:
        """Raise if a parameter was added since sharding."""
        for unit in self.units:
            unit.forget_modules()
        self.registrations.check(self)

    def synchronise_buffers(self, root: nn.Module) -> None:
        """Broadcast the buffers of rank 0, if a training forward may have changed them since the last time. Collective."""
        if self.buffers is None or not self.buffers.due or self.solo:
            return
        if not self.session and not self._open_session("the model", [self.buffers.signature(root)]):
            return  # this rank evaluates alone, with the buffers that it has
        self.buffers.synchronise(root)

    def phase(self) -> int:
        """Return the phase in which a unit is unsharded now."""
        if graph_task() != -1:
            return BACKWARD
        return FORWARD if torch.is_grad_enabled() else EVALUATION

    def _open_session(self, of: str, noted: Sequence[tuple[int, str]] = (), reads: bool | None = None) -> bool:
        """Agree with the other ranks that a forward begins. Collective, unless this rank alone reads the model.

        Args:
            of: what computes, for ranks that only read: once they have agreed, their gathers must be the same.
            noted: operations to note before, each with its code and text.
            reads: nothing is changed, so that this rank may go on alone. By default this is so where no gradients are recorded.

        Returns:
            False if this rank reads the model alone: it evaluates, and other ranks do something else.
        """
        self.versions.abandon_change()
        fresh = self.schedule.fresh
        self.session = self.schedule.fresh = True
        if self.collectives.world == 1:
            if self.reshards_first:
                self.reshards_first = False
                self.schedule.reshard_unused()
            self.schedule.note_changes(self.schedule.changes())
            return True
        numbered = self.engine_order is not None and not self.operations.number
        if self.engine_order is not None and numbered:
            self.operations.number = self.engine_order.number_of_copy(self.original)
        phase = FORWARD if torch.is_grad_enabled() else EVALUATION
        begins = 1 + phase, f"begins a {PHASES[phase]}"
        if phase == EVALUATION:
            begins = zlib.crc32(of.encode()), f"begins an evaluation of {of}"
        noted = [*noted, *self.operations.notes_of_batch(), begins]
        what, changes = "the start of a forward", self.schedule.changes()
        try:
            if phase == EVALUATION if reads is None else reads:
                found = self.lone.meet(what, noted, changes, sure=phase == FORWARD)
            else:
                found = self._agree_on_forward(what, noted, changes)
        except BaseException:
            self.session, self.schedule.fresh = False, fresh
            raise
        if found is None:
            self.schedule.fresh = fresh
        reshards_first, self.reshards_first = self.reshards_first, False
        if found is not None:
            self.schedule.note_changes(None if changes is None else found)
            if reshards_first:
                self.schedule.reshard_unused()
        elif self.engine_order is not None and numbered:  # the others have not numbered their copies yet
            self.engine_order.take_back_number(self.original)
            self.operations.number = 0
        return found is not None

    def _agree_on_forward(
        self, what: str, noted: Sequence[tuple[int, str]], changes: torch.Tensor | None
    ) -> torch.Tensor | None:
        """Compare the ranks before a forward that all make; return what ``OperationSequence.check`` returns. Collective."""
        for code, text in (*noted, self.versions.note()):
            self.operations.note(code, text)
        repeats, self._noted = self._noted == noted, noted
        alone = self.engine_order is not None and self.engine_order.has_one  # else gathers of two models could mix
        if repeats and alone and changes is None and not self.versions.edits.before:
            # As the last forward on which the ranks have agreed. A difference is found when this one ends, see `Forwards.finish`.
            self.operations.begin(what)
            return torch.empty(0, device="cpu")
        found = self.operations.check(what, changes)
        self.versions.agreed()
        return found

    def end_read(self) -> None:
        """End a read of the model, by all ranks or by this one alone."""
        self.lone.end()
        self.session, self.session_before = self.session_before, False

    def unshard(self, unit: Unit, phase: int, of: str = "", reads: bool | None = None) -> None:
        """Unshard `unit`, and start to prefetch the next units. Collective.

        `of`, `reads`: see :meth:`_open_session`.
        """
        if phase != BACKWARD:
            # Each read by itself opens anew, also between the forward of one part of the model and that of the next.
            by_itself = phase == EVALUATION and not (self.forwards.running or self.lone.running)
            if by_itself or not self.session:
                self.session_before |= by_itself and self.session
                self._open_session(of, (), reads)
            if phase == FORWARD and not self.lone.running:
                self.forward_sync = self.require_sync
                self.forward_reduces = self.reduces_each and not self.require_sync
                # By first use: where a unit is used twice (a tied head), the backward of its first use completes its gradients.
                self.forward_order.setdefault(unit.index, unit)
        if unit.gathers:
            self.schedule.unshard(unit, phase)
        if phase == BACKWARD and self.in_backward is not None:
            self.in_backward.note_computed_with(unit)

    # -- backward -----------------------------------------------------------------------------------------------
    def trigger(self, use: Use, grad: torch.Tensor) -> None:
        """Begin the backward of the unit of `use`; a tensor hook on the outputs of its forward."""
        unit = use.unit
        if unit.gathers or unit.holds_gradients():
            self.arm()
        if self.in_backward is not None:
            self.in_backward.note_reached(use)
        if not unit.gathers:
            use.check()
            return
        if unit.is_summoned:
            return
        if torch.is_grad_enabled():  # create_graph: the new graph needs the values once more
            self.schedule.double_backward = self.creating = True
        if use not in unit.uses:
            use.check()
            use.task = graph_task()
            unit.uses.append(use)
            unit.awaits_trigger = False
            self.schedule.reshard_behind(use)
        if use.saved:
            self.unshard(unit, BACKWARD)
        else:
            unit.wait()  # a prefetch for another use of the unit may be running

    @contextlib.contextmanager
    def outermost_backward(self) -> Iterator[None]:
        """Surround a user's call of ``torch.autograd.backward``, of whichever model.

        Changes of deferred gradients before the call were made by the user, those inside by the backward. Where the user's
        change is an error, :meth:`arm` raises it once the backward comes to this engine, because it does not concern other
        models.
        """
        if self.checked:  # with sharded `inputs`, torch calls itself once more, through ``__torch_function__``
            yield
            return
        try:
            self.await_votes()
            try:
                for flat in self.flats:
                    flat.gradients.check_accumulation()
            except ShardError as error:
                self.refusal = error
            self.checked = True
            if self.in_backward is not None:
                self.in_backward.enter_call()
            yield
        finally:
            refused, self.refusal = self.refusal is not None, None
            self.checked = False
            if self.in_backward is not None:
                self.in_backward.leave_call()
            if not refused:  # the next backward must find a refused change again
                for flat in self.flats:
                    flat.gradients.accumulation.keep()

    def holds_gradients(self) -> bool:
        """Return True if gradients are deferred, partially accumulated, or were lost while they were deferred."""
        gradients = [flat.gradients for flat in self.flats]
        return any(g.waits or g.lost or g.accumulation.partial for g in gradients)

    def arm(self) -> None:
        """Begin a backward of this engine, once for each, and have :meth:`end_backward` called when its graph task ends."""
        task = graph_task()
        if task in self.tasks:
            return
        if self.end is not None and self.end() is not None:
            if task != -1:  # reentrant checkpointing runs a backward inside the backward
                self.tasks.add(task)
                ended = functools.partial(self.schedule.end_nested, task)
                torch.autograd.Variable._execution_engine.queue_callback(ended)
            return
        if self.refusal is not None:
            raise self.refusal
        self.await_votes()  # of a backward before, since none of this engine is running
        if self.feeds_back and self.collectives.size > 1 and grad_scaler.is_running():
            raise ConfigError(
                f"rank {self.collectives.world_rank}: the loss was scaled by a GradScaler, and ShardConfig.quantized keeps what "
                "gradients have lost for the next step, which another scale would make wrong. Set error_feedback=False, or "
                "compute in bfloat16 without a scaler."
            )
        if self.in_backward is not None:
            self.in_backward.begin(self.forward_sync)
        self.syncing = self.forward_sync or self.forward_reduces
        partial = self.syncing and not self.forward_sync and self.collectives.data_parallel_size > 1
        for unit in self.units:
            for use in (*unit.uses, *unit.kept):
                use.check()
            for flat in unit.flats:
                flat.gradients.begin_backward(self.checked, not self.syncing, partial)
        self.schedule.begin_backward()
        self.tasks = {task}
        self.creating = torch.is_grad_enabled()
        self.schedule.double_backward |= self.creating
        # Replicated units are not unsharded, so that the ranks have not agreed on the order in which they were used.
        sharded = self.collectives.size > 1
        self.reductions.begin(self.forward_order.values() if sharded else self.units)
        if self.engine_order is not None:
            self.engine_order.begin(self, task)
        # The graph task alone refers to this callback: if the task ends with an exception, the callback dies.
        end = functools.partial(self.end_backward)
        self.end = weakref.ref(end, lambda _: self._abandon())
        torch.autograd.Variable._execution_engine.queue_callback(end)

    def on_grad(self, unit: Unit, flat: FlatBuffer, index: int, grad: torch.Tensor, unshared: bool = False) -> None:
        """Add the complete gradient of an unsharded parameter to the gradient buffer; reduce what is complete.

        `unshared`: nobody else refers to the gradient.
        """
        if graph_task() not in self.tasks:
            self.arm()
        # A unit of which this use has saved nothing may be prefetched for an earlier use, and is not waited for.
        if unit.state is State.GATHERING and not unit.uses and not unit.kept:
            raise UnitStateError(
                f"rank {self.collectives.world_rank}: a gradient of {flat.layout.slots[index].name} arrived while unit "
                f"{unit.name!r} was still being gathered; backward reached it without its trigger."
            )
        if grad.is_sparse or grad.requires_grad:
            self._refuse(flat.layout.slots[index].name, grad)
        gradients = flat.gradients
        if not gradients.expected[index]:  # frozen since the forward
            return
        if gradients.accept(index, grad, unshared) and self.syncing:
            self.reductions.advance()

    def _refuse(self, name: str, grad: torch.Tensor) -> None:
        if grad.is_sparse:
            raise ShardError(
                f"rank {self.collectives.world_rank}: {name} received a sparse gradient, which can't be sharded; build the "
                "embedding with sparse=False."
            )
        raise ShardError(
            f"rank {self.collectives.world_rank}: backward(create_graph=True) reached {name}; the reduced .grad has no "
            "graph, so what is computed from it would lack its gradient. Use torch.autograd.grad(loss, parameters, "
            "create_graph=True), whose results have one."
        )

    def end_backward(self) -> None:
        """End the backward after its last node: compare with the other ranks, and reduce what is left. Collective.

        Where a backward runs through several engines, the last one to end publishes the gradients of all.
        """
        self.tasks = set()
        try:
            self.schedule.end_backward()
            if self.syncing:
                self.reductions.compare()
            # An engine that waits for others keeps `end`, so that it is abandoned if the graph task fails before they end.
            ended: list[Runtime] = [self] if self.engine_order is None else self.engine_order.end(self)
            self._compare_order()
        except BaseException:
            self._abandon()
            raise
        for i, runtime in enumerate(ended):
            try:
                runtime._publish()
            except BaseException:
                for other in ended[i:]:
                    other._abandon()
                raise

    def _publish(self) -> None:
        """Wait for all reductions, publish `.grad`, and reshard; call when the ranks have agreed on what is reduced."""
        schedule, self.end = self.schedule, None
        if self.syncing:
            self.reductions.flush()
            if self.in_backward is not None:
                self.in_backward.end()
                self.versions.note_change()
                schedule.values_changed()
        else:
            for flat in self.flats:
                flat.gradients.show_deferred()
        schedule.double_backward = self.creating
        for unit in self.units:
            unit.awaits_trigger = False
            unit.uses.clear()
            unit.kept.clear()
        # A frozen model, say a teacher, may never have a backward of its own after which to drop its secondary shards. If one
        # comes after all, it gathers from all ranks.
        for runtime in self.engine_order.engines if self.engine_order is not None else ():
            for unit in runtime.units:
                unit.drop_secondary_shards()
        schedule.reshard_unused()
        self.collectives.drop_spares()  # to save memory between steps; a backward allocates the buffers again
        if self.syncing:
            self.forward_order.clear()
            if not self.forwards.depth:
                self.session = False

    def note_issued(self, kind: str, unit: Unit) -> None:
        """Record that a collective of `unit` was issued, in the sequence that the ranks compare."""
        if kind != "reduce" and self.in_backward is not None:
            self.in_backward.note_unsharded(unit)
        if self.engine_order is not None and (kind == "reduce" or unit.sharded):
            self.engine_order.note(kind, self.operations.number, unit.index)

    def _compare_order(self) -> None:
        """Compare the order of collectives with the other ranks, if the backward ran through several engines. Collective."""
        issued = self.engine_order.order() if self.engine_order is not None else None
        if issued is not None:
            self.operations.note(issued, f"has mixed the collectives of several models in the order {issued:x}")
            self.operations.check("the end of a backward through several models")

    def _abandon(self) -> None:
        """Leave the engine as it was before a backward that has failed."""
        if self.engine_order is not None:
            self.engine_order.abandon(self)
        self.end, self.tasks = None, set()
        self.reductions.abandon()
        self.schedule.double_backward = False
        for unit in self.units:
            unit.uses.clear()
            unit.kept.clear()
            unit.awaits_trigger = False
            unit.drop_secondary_shards()
            for flat in unit.flats:
                flat.gradients.forget()
            if unit.state is not State.SHARDED and unit.gathers and not unit.running and not unit.is_summoned:
                with contextlib.suppress(ShardError):
                    if all(p.wait_at_most(PAUSE) for p in unit.pending):
                        self.schedule.reshard(unit)
                if unit.state is State.GATHERING:
                    # The unshard may never end. The memory stays allocated, since the collective may still write to it.
                    unit.pending, unit.state = [], State.SHARDED
        self.collectives.drop_spares()
        self.forward_order.clear()
        self.session = False

    # -- between steps ------------------------------------------------------------------------------------------
    def parameters_changed(self) -> None:
        """Forget unsharded parameters and graphs over them, because the shards were edited (a step, a load)."""
        self.versions.note_change()
        if self.forwards.depth:
            self.forwards.leave_interrupted()
        if graph_task() == -1 and not self.forwards.depth:
            self.schedule.values_changed()

    def forget_residuals(self) -> None:
        """Drop the error feedback of quantized gradients, which belongs to other values once parameters were loaded."""
        for flat in self.flats:
            if flat.gradients.quantized is not None:
                flat.gradients.quantized.forget()


def _newer_nodes(tensors: list[torch.Tensor], end: int) -> bool:
    """Return True if the graph got nodes after those of `tensors`; `end` is the next sequence number."""
    numbers = [t.grad_fn._sequence_nr() for t in tensors if t.grad_fn is not None]  # type: ignore[attr-defined]
    # Reading `grad_fn` of a view whose base was edited makes a new node, whose number is `end` or more.
    return bool(max((n for n in numbers if n < end), default=-1) + 1 < end)
