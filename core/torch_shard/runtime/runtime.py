"""A sharded model's forwards and backwards, as its hooks see them.

Forward.   What a unit computes leaves hooks on its outputs. See :mod:`.forward_hooks`.
Backward.  A hook on the outputs gathers again what autograd kept something of. Autograd runs the nodes of one device in
           falling order of their sequence number, so when the trigger of a unit fires, every node made after the
           beginning of a later unit's forward has run: that later unit is released. This needs no identity function on
           the inputs (which would make in-place operations on them an error) and covers frozen weights and LoRA,
           where gradients of parameters say nothing about who is still needed.
Gathers, their order and prefetch: :mod:`.unshard_schedule`. Reductions: :mod:`.reduce_schedule`.
"""

from __future__ import annotations

import contextlib
import copy
import weakref
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..comm.collectives import Collectives
from ..comm.divergence import Agreement
from ..comm.multi_engine_order import over
from ..comm.traffic_statistics import GatheredBytes
from ..config.precision import precision_of
from ..config.shard_config import ShardConfig
from ..errors import ConfigError, ShardError, ShardPicklingError, UnitStateError
from ..plan.matrix_owners import OwnerMaps
from ..unit.flat_buffer import FlatBuffer
from ..unit.phases import BACKWARD, EVALUATION, FORWARD, PHASES
from ..unit.unit import State, Unit
from ..utils.autograd_private import graph_task, sequence_number
from . import grad_scaler
from .backward_hooks import Check, EndOfBackward, EndOfNested, Trigger, Use
from .buffer_sync import BufferSync
from .forward_hooks import Forwards
from .on_demand import OnDemand
from .reduce_schedule import PAUSE, Reductions
from .replaced_params import Registrations
from .unshard_schedule import Schedule

if TYPE_CHECKING:
    from ..comm.comm_hook import CommHook
    from ..offload.host import Host
    from ..shard_tensor.tensor import ShardTensor
    from .ports import StepInBackward


class Runtime:
    """Decides when; one for each sharded model."""

    def __init__(self, config: ShardConfig, collectives: Collectives, host: Host | None = None) -> None:
        """`host`: where parameters and optimizer state are, if they are not on the device."""
        self.config, self.collectives, self.host = config, collectives, host
        if host is not None:
            host.users.add(self)
        self.units: list[Unit] = []
        self.by_index: dict[int, Unit] = {}  # a copy of a submodule has some of the indices only
        self.gathered_bytes = GatheredBytes()
        self.buffers: BufferSync | None = None
        self.agreement: Agreement | None = None
        self.require_sync = True
        self.reduces_each = False  # while `require_sync` is False: each backward reduces all the same
        self.forwards = Forwards(self)
        self.session = False  # a forward has begun since the last backward ended
        self.on_demand = OnDemand(self)
        self.schedule = Schedule(config, self.by_index, replicated=collectives.size == 1 < collectives.averaged)
        self.solo = 0  # inside gathered(ranks=...): a forward here is this rank's own affair
        self.forward_order: dict[int, Unit] = {}
        self.forward_sync = True
        self.forward_reduces = False  # as `reduces_each` was
        self.end: weakref.ref[EndOfBackward] | None = None
        self.state_dict_settings: Any = None  # see torch_shard.state_dict_type
        self.tasks: set[int] = set()
        self.syncing = True
        self.reductions = Reductions(collectives, self.note_issued)
        channel = collectives.gather_channel
        self.together = over(channel.groups) if channel is not None else None
        self.number = 0  # among the engines over these groups; 0: a copy that has not run yet
        self.original = 0  # the number of the engine that this is a copy of
        self.checked = False  # held gradients were looked at before the running backward
        self.refusal: ShardError | None = None  # what was found then, for a backward that comes to this engine
        self.creating = False  # the running backward makes a graph of gradients, which reads gathered values
        self.registrations = Registrations()
        self.owners = OwnerMaps()  # of optimizers that step on whole matrices
        self.in_backward: StepInBackward | None = None  # the optimizer that steps during backward
        self.steps: weakref.ref[Any] | None = None  # what follows optimizers' steps, once there is an engine
        self.refuses_scaled = precision_of(config.precision).needs_no_scaler
        quantized = config.quantized
        # What a step leaves for the next one is in the units of its loss, which a scaler changes, and drops steps.
        self.feeds_back = quantized is not None and quantized.gradients is not None and quantized.error_feedback
        if self.refuses_scaled or self.feeds_back:
            grad_scaler.follow()

    def add(self, unit: Unit) -> None:
        unit.runtime = self
        self.units.append(unit)
        self.units.sort(key=lambda u: u.index)
        self.by_index[unit.index] = unit

    def ready(self) -> None:
        if self.together is not None:
            self.together.join(self)
            self.together.widen(2 + sum(4 + len(u.params) for u in self.units))
        self.agreement = self.schedule.agreement = Agreement(self.collectives, self.together)
        # Ranks that have differed remember different orders.
        self.agreement.on_difference = self.schedule.order.forget

    def number_as_new(self) -> None:
        """On all ranks in one order."""
        if self.together is not None and self.agreement is not None:
            self.number = self.agreement.number = self.together.number()

    def __deepcopy__(self, memo: dict[int, Any]) -> Runtime:
        other = Runtime(self.config, self.collectives, self.host)
        memo[id(self)] = other
        other.ready()
        other.original = self.number or self.original
        if self.buffers is not None:
            other.buffers = copy.deepcopy(self.buffers, memo)
        other.registrations.ignored = self.registrations.ignored
        return other

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ShardPicklingError(
            f"rank {self.collectives.world_rank}: a sharded model can't be pickled (torch.save(model)), since each rank holds "
            'slices only. Save engine.state_dict(form="full") (accelerator.get_state_dict(model)) instead, called on all ranks, '
            "with a torch.distributed.barrier() behind what one rank writes."
        )

    # -- what units ask -----------------------------------------------------------------------------------------
    @property
    def in_forward(self) -> bool:
        """Whether a forward of the model or of one of its units is running."""
        return self.forwards.running

    @property
    def comm_hook(self) -> CommHook | None:
        """The user's function that reduces gradients in place of the engine."""
        return self.reductions.hook

    @comm_hook.setter
    def comm_hook(self, hook: CommHook | None) -> None:
        self.reductions.hook = hook

    def unshard_on_demand(
        self, unit: Unit, param: ShardTensor, func: Any, local_ok: bool, dtypes: frozenset[torch.dtype]
    ) -> torch.Tensor | None:
        """Return what `func` computes with in place of `param`; None where the shards will do. See :class:`.OnDemand`."""
        return self.on_demand.leaf(unit, param, func, local_ok, dtypes)

    def on_demand_done(self, unit: Unit, result: Any, copies: list[torch.Tensor], name: str) -> None:
        """End the operation that :meth:`unshard_on_demand` was asked for."""
        self.on_demand.done(unit, result, copies, name)

    def watch_copies(self, copies: list[torch.Tensor], name: str) -> None:
        """Have an edit of one of `copies`, which stand for views of `name`, be an error."""
        self.on_demand.watch_copies(copies, name)

    def check_grad_reader(self) -> None:
        """Raise where `.grad` is read that an optimizer has consumed in backward already."""
        if self.in_backward is not None:
            self.in_backward.check_reader()

    def leave_interrupted(self) -> None:
        """Do what the hooks of forwards that an interrupt has ended would have done. Not collective."""
        self.forwards.leave_interrupted()

    # -- forward ------------------------------------------------------------------------------------------------
    def watch_outputs(self, use: Use, outputs: list[torch.Tensor], forward: bool = True) -> None:
        """Have backward come back to `use`, a module's forward or one operation, through the tensors it made."""
        unit = use.unit
        # A leaf that comes back is an input, which backward reaches when it has left the unit.
        found = [t for t in outputs if t.requires_grad and not t.is_leaf]
        use.end = sequence_number()
        use.saved, use.versions, by_python = unit.references()
        if use.saved and forward:
            found += unit.kept_tensors()
        # An in-place operation on a view replaces its node, and the hook with it; the base's node stays.
        found += [base for t in found if (base := t._base) is not None and base.requires_grad and not base.is_leaf]
        if self.in_backward is not None and found:
            self.in_backward.expect(use)
        if not unit.gathers:
            # Held gradients are to be reduced by a backward in which no leaf of the unit gets one, too.
            if use.versions or self.in_backward is not None or unit.holds_gradients():
                for tensor in found:
                    tensor.register_hook(Check(self, use))
            return
        trigger = Trigger(self, use)
        for tensor in found:
            tensor.register_hook(trigger)
        if use.saved and (not found or (forward and (by_python or _newer_nodes(found, use.end)))):
            # Nothing to hook, a leaf was put aside for later, or a tensor made after the last one found has been handed out
            # some other way, so that backward may come to it before any hook: keep it until backward ends.
            unit.kept.append(use)

    def check_registrations(self) -> None:
        """Raise if a parameter was added since sharding."""
        for unit in self.units:
            unit.forget_modules()
        leaves = [leaf for u in self.units for f in u.flats for leaf in f.leaves]
        self.registrations.check(self, leaves)

    def synchronise_buffers(self, root: nn.Module) -> None:
        """Have the buffers of rank 0 on all ranks, if a training forward has changed them since. Collective."""
        if self.buffers is None or not self.buffers.due or self.solo:
            return
        assert self.agreement is not None
        self.agreement.note(*self.buffers.signature(root))
        if not self.session:
            self._open_session()
        self.buffers.synchronise(root)

    def phase(self) -> int:
        if graph_task() != -1:
            return BACKWARD
        return FORWARD if torch.is_grad_enabled() else EVALUATION

    def _open_session(self) -> None:
        if self.collectives.world == 1:
            self.schedule.agree_on_changes("the start of a forward")
            return
        self.session = self.schedule.fresh = True
        assert self.agreement is not None
        if self.together is not None and not self.number:
            self.number = self.agreement.number = self.together.number_of_copy(self.original)
        phase = FORWARD if torch.is_grad_enabled() else EVALUATION
        self.agreement.note_batch()
        self.agreement.note(1 + phase, f"begins a {PHASES[phase]}")
        if not self.schedule.agree_on_changes("the start of a forward"):
            self.agreement.check("the start of a forward")

    def demand(self, unit: Unit, phase: int) -> None:
        """Have `unit` gathered when this returns, and the next ones on their way. Collective."""
        if phase != BACKWARD:
            if not self.session:
                self._open_session()
            if phase == FORWARD:
                self.forward_sync = self.require_sync
                self.forward_reduces = self.reduces_each and not self.require_sync
                # By first use: the gradients of a unit used again (a tied head) are complete after the first one's backward.
                self.forward_order.setdefault(unit.index, unit)
        if unit.gathers:
            self.schedule.demand(unit, phase)
        if phase == BACKWARD and self.in_backward is not None:
            self.in_backward.demanded(unit)

    # -- backward -----------------------------------------------------------------------------------------------
    def trigger(self, use: Use) -> None:
        """The gradient of an output of `use` has arrived: backward of that unit begins."""
        self.arm()
        unit = use.unit
        if self.in_backward is not None:
            self.in_backward.reached(use)
        if unit.is_summoned:
            return
        if torch.is_grad_enabled():  # create_graph: the new graph needs the values once more
            self.schedule.double_backward = self.creating = True
        if use not in unit.uses:
            use.check()
            use.task = graph_task()
            unit.uses.append(use)
            unit.held = False
            self.schedule.release_behind(use)
        if use.saved:
            self.demand(unit, BACKWARD)
        else:
            unit.note_stream()
            unit.wait()  # another use of the unit may have made a prefetch of it that nobody waits for

    @contextlib.contextmanager
    def outermost_backward(self) -> Iterator[None]:
        """Surround a call of ``torch.autograd.backward`` by the user, of whichever model: what changed in held gradients up to
        now was done by the user, what changes inside is done by the backward.

        A change by the user that is refused is raised by :meth:`arm`, once the backward comes to this engine: it is no affair
        of other models.
        """
        if self.checked:  # with sharded `inputs`, torch calls itself once more, by way of ``__torch_function__``
            yield
            return
        try:
            try:
                for unit in self.units:
                    for flat in unit.flats:
                        flat.gradients.check_held()
            except ShardError as error:
                self.refusal = error
            self.checked = True
            if self.in_backward is not None:
                self.in_backward.outermost(True)
            yield
        finally:
            refused, self.refusal = self.refusal is not None, None
            self.checked = False
            if self.in_backward is not None:
                self.in_backward.outermost(False)
            if not refused:  # else the next backward is to find the change again
                for unit in self.units:
                    for flat in unit.flats:
                        flat.gradients.keep_held()

    def holds_gradients(self) -> bool:
        """Whether something waits for its reduction, or for the end of an accumulation, or was lost while it did."""
        lost = (flat.gradients.lost or flat.gradients.unfinished for unit in self.units for flat in unit.flats)
        return any(unit.holds_gradients() for unit in self.units) or any(lost)

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
        if self.refusal is not None:
            raise self.refusal
        if self.refuses_scaled and grad_scaler.is_running():
            raise ConfigError(
                f"rank {self.collectives.world_rank}: the loss was scaled by a GradScaler, and ShardConfig.precision computes in "
                "bfloat16, which needs none. Leave the scaler out (GradScaler(enabled=False)), or use torch.float16."
            )
        if self.feeds_back and self.collectives.size > 1 and grad_scaler.is_running():
            raise ConfigError(
                f"rank {self.collectives.world_rank}: the loss was scaled by a GradScaler, and ShardConfig.quantized keeps what "
                "gradients have lost for the next step, which another scale would make wrong. Set error_feedback=False, or "
                "compute in bfloat16 without a scaler."
            )
        if self.in_backward is not None:
            self.in_backward.begin(self.forward_sync)
        self.syncing = self.forward_sync or self.forward_reduces
        partial = self.syncing and not self.forward_sync and self.collectives.averaged > 1
        for unit in self.units:
            unit.rounds = 0
            for use in (*unit.uses, *unit.kept):
                use.check()
            for flat in unit.flats:
                flat.gradients.begin_backward(self.checked, not self.syncing, partial)
        self.schedule.begin_backward()
        self.tasks = {task}
        self.creating = torch.is_grad_enabled()
        self.schedule.double_backward |= self.creating
        # Replicated units are gathered by nobody, so the ranks have not agreed on the order in which they were used.
        sharded = self.collectives.size > 1
        self.reductions.begin(self.forward_order.values() if sharded else self.units)
        if self.together is not None:
            self.together.begin(self, task)
        end = EndOfBackward(self)
        self.end = weakref.ref(end, lambda _: self._abandon())
        torch.autograd.Variable._execution_engine.queue_callback(end)

    def on_grad(self, unit: Unit, flat: FlatBuffer, index: int, grad: torch.Tensor) -> None:
        """A leaf's gradient is complete: move it into the unit's buffer."""
        if graph_task() not in self.tasks:
            self.arm()
        # A unit that this use saved nothing of is not waited for: it may be on its way for an earlier use.
        if unit.state is State.GATHERING and not unit.uses and not unit.kept:
            raise UnitStateError(
                f"rank {self.collectives.world_rank}: a gradient of {flat.layout.slots[index].name} arrived while unit "
                f"{unit.name!r} was still being gathered; backward reached it without its trigger."
            )
        if grad.is_sparse or grad.requires_grad:
            self._refuse(flat.layout.slots[index].name, grad)
        gradients = flat.gradients
        if gradients.frozen[index]:  # since the forward
            return
        if gradients.accept(index, grad) and self.syncing and unit.rounds == 0:
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
        """The last node has run: compare with the other ranks and send what is left. Behind the last engine that the backward ran
        through: publish `.grad` of all of them."""
        self.tasks = set()
        try:
            self.schedule.end_backward()
            if self.syncing:
                assert self.agreement is not None
                idle = self.schedule.passed - self.schedule.needed
                if self.reductions.compare(self.units, self.agreement, idle, self.in_backward):
                    self.schedule.order.forget()  # no rank needs it in backward any more: learn the order anew
            # One that waits for the others keeps `end`: should the graph task die before they come, it is abandoned.
            ended: list[Runtime] = [self] if self.together is None else self.together.end(self)
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
        """The ranks agree, and everything has been sent: wait for it, and leave the backward."""
        schedule, self.end = self.schedule, None
        if self.syncing:
            self.reductions.flush(self.units)
            if self.in_backward is not None:
                self.in_backward.end()
                schedule.values_changed()
        else:
            for unit in self.units:
                for flat in unit.flats:
                    flat.gradients.show_held()
        schedule.double_backward = self.creating
        for unit in self.units:
            unit.held = False
            unit.uses.clear()
            unit.kept.clear()
        if self.together is not None:
            self.together.drop_parts()
        schedule.release_unused()
        self.collectives.drop_spares()  # memory between steps counts; a backward takes them up again
        if self.syncing:
            self._forget_forwards()
            if not self.forwards.depth:
                self.session = False

    def note_issued(self, kind: str, unit: Unit) -> None:
        if kind != "reduce" and self.in_backward is not None:
            self.in_backward.gathered(unit)
        if self.together is not None and (kind == "reduce" or unit.sharded):
            self.together.note(kind, self.number, unit.index)

    def _compare_order(self) -> None:
        """Where the backward ran through several engines: were their collectives in one order?"""
        issued = self.together.order() if self.together is not None else None
        if issued is not None:
            assert self.agreement is not None
            self.agreement.note(issued, f"has mixed the collectives of several models in the order {issued:x}")
            self.agreement.check("the end of a backward through several models")

    def _abandon(self) -> None:
        """Backward ended with an exception: leave the engine as it was before it."""
        if self.together is not None:
            self.together.abandon(self)
        self.end, self.tasks = None, set()
        self.reductions.abandon()
        self.schedule.double_backward = False
        for unit in self.units:
            unit.uses.clear()
            unit.kept.clear()
            unit.held = False
            unit.drop_parts()
            for flat in unit.flats:
                flat.gradients.forget()
            if unit.state is not State.SHARDED and unit.gathers and not unit.running and not unit.is_summoned:
                with contextlib.suppress(ShardError):
                    if all(p.settle(PAUSE) for p in unit.pending):
                        self.schedule.release(unit)
                if unit.state is State.GATHERING:
                    # Its gather may never end; the memory stays, since the collective may still write to it.
                    unit.pending, unit.state = [], State.SHARDED
        self.collectives.drop_spares()
        self._forget_forwards()
        self.session = False

    def _forget_forwards(self) -> None:
        self.forward_order.clear()
        for unit in self.units:
            for flat in unit.flats:
                flat.gradients.forget_forwards()

    # -- between steps ------------------------------------------------------------------------------------------
    def parameters_changed(self) -> None:
        """The shards were edited (an optimizer step, `p.mul_`): gathered copies and graphs over them are out of date."""
        if self.forwards.depth:
            self.forwards.leave_interrupted()
        if graph_task() == -1 and not self.forwards.depth:
            self.schedule.values_changed()

    def forget_residuals(self) -> None:
        """Parameters were loaded: what quantized gradients have lost up to now was that of others."""
        for unit in self.units:
            for flat in unit.flats:
                if flat.gradients.quantized is not None:
                    flat.gradients.quantized.forget()


def _newer_nodes(tensors: list[torch.Tensor], end: int) -> bool:
    """Whether the graph got nodes after those of `tensors`; `end` is the next sequence number."""
    numbers = [t.grad_fn._sequence_nr() for t in tensors if t.grad_fn is not None]  # type: ignore[attr-defined]
    # A view of something that was edited gets a node when its `grad_fn` is read, here.
    return bool(max((n for n in numbers if n < end), default=-1) + 1 < end)
