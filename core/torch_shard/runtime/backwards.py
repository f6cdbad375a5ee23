"""A sharded model's backwards, from the hooks on forwards' outputs to the published `.grad`.

A hook on the outputs of a forward, the *trigger*, unshards its unit if autograd has saved some of its parameters. Autograd runs
the nodes of one device in falling order of their sequence number. So when the trigger of a unit fires, all nodes have run that
later forwards have made, and the units of these forwards are resharded. This needs no identity function on the inputs, which
would make in-place operations on them an error. It also covers frozen weights and LoRA, where gradients of parameters don't
tell which units are still needed.
"""

from __future__ import annotations

import contextlib
import functools
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from ..errors import ConfigError, ShardError, UnitStateError
from ..log import ANY_RANK, logger
from ..schedule.phases import BACKWARD
from ..schedule.unit_state import State
from ..unit.flat_buffer import FlatBuffer
from ..unit.references import references_to
from ..unit.unit import Unit
from ..utils import transforms
from ..utils.autograd_private import graph_task, sequence_number
from . import grad_scaler
from .out_of_memory import Moment, explain
from .reduce_schedule import PAUSE
from .use import Use

if TYPE_CHECKING:
    from .runtime import Runtime


class Backwards:
    """The running backward of one sharded model, and what leads to it; one for each :class:`Runtime`."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self._end: weakref.ref[Any] | None = None  # the callback at the end of the running backward
        # The callback, and the graph task, of an outer backward that recomputes layers in backwards of their own. Perhaps only
        # these inner backwards reach this engine.
        self._end_of_outer: weakref.ref[Any] | None = None
        self._outer_task = -1
        self._tasks: set[int] = set()  # the autograd graph tasks of the running backward: its own, and nested ones
        self._begun = 0  # the number of backwards
        self._reduces = True  # the running backward reduces
        self._creates_graph = False  # the running backward makes a graph of gradients, which reads unsharded parameters
        self._called = False  # inside a user's call of backward, before which deferred gradients were checked
        self._refusal: ShardError | None = None  # the error of that check, raised if the backward comes to this engine
        self._abandoning = threading.RLock()
        self.failed: Moment | None = None  # that at which the latest backward has failed

    def watch_outputs(self, use: Use, outputs: list[torch.Tensor], forward: bool = True) -> None:
        """Hook the outputs of `use`, a module's forward or one operation, so that backward triggers its unit."""
        unit = use.unit
        outputs = transforms.at_all_levels(outputs)
        found = _made_by_forward(outputs)
        use.end = sequence_number()
        use.saved, use.versions, by_python = references_to(unit, use.looks_up)
        if use.saved and forward:
            found += unit.kept_tensors.find()
        # An in-place operation on a view replaces its node, and the hook with it; the base's node stays.
        found += [base for t in found if (base := t._base) is not None and base.requires_grad and not base.is_leaf]
        stepping = self.runtime.in_backward
        if stepping is not None and found:
            stepping.expect(use)
        # Deferred gradients have to be reduced also by a backward in which no parameter of the unit gets a gradient.
        if unit.gathers or use.versions or stepping is not None or unit.holds_gradients():
            trigger = functools.partial(self.trigger, use)
            for tensor in found:
                tensor.register_hook(trigger)
        if unit.gathers and forward and (by_python or (use.saved and _newer_nodes(found, use.end))):
            # Backward may reach this use without its trigger. There is no tensor to hook, or the user has put an unsharded
            # parameter aside, or a later tensor than those found has left the forward some other way. So the unit stays
            # unsharded until backward ends.
            unit.kept.append(use)

    def watch_model(self, outputs: list[torch.Tensor]) -> None:
        """Hook the outputs of a replicated model, so that a backward begins also where no parameter gets a gradient.

        The other ranks may have gradients, and wait for this one when they reduce them. ``torch.autograd.grad`` reduces nothing.
        """

        def begin(grad: torch.Tensor) -> None:
            if self._called:
                self._arm()

        if any(param.requires_grad for flat in self.runtime.flats for param in flat.params):
            for tensor in _made_by_forward(transforms.at_all_levels(outputs)):
                tensor.register_hook(begin)

    def trigger(self, use: Use, grad: torch.Tensor) -> None:
        """Begin the backward of the unit of `use`; a tensor hook on the outputs of its forward."""
        if transforms.running() is not None:
            transforms.outside(self.trigger, use, grad)
            return
        runtime, unit = self.runtime, use.unit
        if unit.gathers or unit.holds_gradients():
            self._arm()
        if runtime.in_backward is not None:
            runtime.in_backward.note_reached(use)
        if not unit.gathers:
            use.check()
            return
        if unit.is_summoned:
            return
        if transforms.backward_is_recorded():  # create_graph: the new graph needs the values once more
            runtime.schedule.double_backward = self._creates_graph = True
        if use not in unit.uses:
            use.check()
            use.task = graph_task()
            unit.uses.append(use)
            unit.awaits_trigger = False
            runtime.schedule.reshard_behind(use)
        if use.saved:
            runtime.unshard(unit, BACKWARD)
        else:
            unit.wait()  # a prefetch for another use of the unit may be running

    @contextlib.contextmanager
    def outermost_backward(self) -> Iterator[None]:
        """Surround a user's call of ``torch.autograd.backward``, of whichever model.

        Changes of deferred gradients before the call were made by the user, those inside by the backward. Where the user's
        change is an error, :meth:`_arm` raises it once the backward comes to this engine, because it does not concern other
        models.
        """
        if self._called:  # with sharded `inputs`, torch calls itself once more, through ``__torch_function__``
            yield
            return
        runtime, begun = self.runtime, self._begun
        if self._end is not None:  # autograd still keeps the callback of a torch.autograd.grad that has failed
            self._abandon_if()
        try:
            runtime.await_votes()
            try:
                for flat in runtime.flats:
                    flat.gradients.check_accumulation()
            except ShardError as error:
                self._refusal = error
            self._called = True
            self._end_of_outer = None  # a thread of a device may still keep the graph task of a call that has failed
            if runtime.in_backward is not None:
                runtime.in_backward.enter_call()
            yield
        except BaseException as error:
            if self._begun > begun:
                explain(runtime, error, "backward")
            # Not only when autograd drops the graph task: a thread of a device may keep it until the next step runs.
            self._abandon_after_failure()
            raise
        finally:
            refused, self._refusal = self._refusal is not None, None
            self._called = False
            if runtime.in_backward is not None:
                runtime.in_backward.leave_call()
            if not refused:  # the next backward must find a refused change again
                for flat in runtime.flats:
                    flat.gradients.accumulation.keep()

    def _arm(self) -> None:
        """Begin this engine's backward, unless it runs already, and have :meth:`end_backward` called when its graph task ends."""
        runtime, task = self.runtime, graph_task()
        if task in self._tasks:
            return
        if self._end is not None and self._end() is not None:
            if task != -1:
                self._nest(task)
            return
        if self._refusal is not None:
            raise self._refusal
        runtime.await_votes()  # those of an earlier backward, since none of this engine is running
        if runtime.feeds_back and runtime.collectives.size > 1 and grad_scaler.is_running():
            raise ConfigError(
                f"rank {runtime.collectives.world_rank}: the loss was scaled by a GradScaler, and ShardConfig.quantized keeps "
                "what gradients have lost for the next step, which another scale would make wrong. Set "
                "error_feedback=False, or compute in bfloat16 without a scaler."
            )
        if runtime.in_backward is not None:
            runtime.in_backward.begin(runtime.forward_sync)
        self._reduces = runtime.forward_sync or runtime.forward_reduces
        partial = self._reduces and not runtime.forward_sync and runtime.collectives.data_parallel_size > 1
        for unit in runtime.units:
            for use in (*unit.uses, *unit.kept):
                use.check()
            for flat in unit.flats:
                flat.gradients.begin_backward(checked=self._called, deferred=not self._reduces, partial=partial)
        runtime.schedule.begin_backward()
        self._begun += 1
        self.failed = None
        self._creates_graph = transforms.backward_is_recorded()
        runtime.schedule.double_backward |= self._creates_graph
        # Replicated units are not unsharded, so that the ranks have not agreed on the order in which they were used.
        sharded = runtime.collectives.size > 1
        runtime.reductions.begin(runtime.forward_order.values() if sharded else runtime.units)
        # The graph task alone refers to this callback: if the task ends with an exception, the callback dies.
        end = None if self._end_of_outer is None else self._end_of_outer()
        self._tasks = {task if end is None else self._outer_task}
        runtime.engine_order.begin(runtime, *self._tasks)
        if end is None:
            end = functools.partial(self.end_backward)
            _queue(end)
        elif task != self._outer_task:
            self._nest(task)
        self._end = weakref.ref(end, self._abandon_if)

    def begin_nested(self) -> None:
        """Make this engine's backward end with the outer one that runs; that of a recomputed layer is about to begin inside it.

        Reentrant checkpointing runs a backward for each layer, and these may be the only ones that reach the engine. Otherwise
        the engine would treat each as a separate backward, at whose end it waits for all reductions and for the other ranks.
        """
        if self._called and self._end is None and self._end_of_outer is None:
            end = functools.partial(self._end_outer, graph_task())
            self._end_of_outer, self._outer_task = weakref.ref(end), graph_task()
            _queue(end)

    def _end_outer(self, task: int) -> None:
        outer = self._end_of_outer
        if self._end is not None and outer is not None and task == self._outer_task and self._end() is outer():
            self.end_backward()

    def _nest(self, task: int) -> None:
        """Note a nested backward; at its end, units that only it has needed are resharded."""
        self._tasks.add(task)
        _queue(functools.partial(self.runtime.schedule.end_nested, task))

    def on_grad(self, unit: Unit, flat: FlatBuffer, index: int, grad: torch.Tensor, unshared: bool = False) -> None:
        """Add the complete gradient of an unsharded parameter to the gradient buffer; reduce what is complete.

        `unshared`: nobody else refers to the gradient.
        """
        if graph_task() not in self._tasks:
            self._arm()
        if unit.recomputes:
            unit.end_recomputation()
        # A unit of which this use has saved nothing may be prefetched for an earlier use, and is not waited for.
        if unit.state is State.GATHERING and not unit.uses and not unit.kept:
            raise UnitStateError(
                f"rank {self.runtime.collectives.world_rank}: a gradient of {flat.layout.slots[index].name} arrived while unit "
                f"{unit.name!r} was still being gathered; backward reached it without its trigger."
            )
        if grad.is_sparse or grad.requires_grad:
            self._refuse(flat.layout.slots[index].name, grad)
        gradients = flat.gradients
        if not gradients.expected[index]:  # frozen since the forward
            return
        if gradients.accept(index, grad, unshared) and self._reduces:
            self.runtime.reductions.advance()

    def _refuse(self, name: str, grad: torch.Tensor) -> None:
        where = f"rank {self.runtime.collectives.world_rank}"
        if grad.is_sparse:
            raise ShardError(
                f"{where}: {name} received a sparse gradient, which can't be sharded; build the embedding with sparse=False."
            )
        raise ShardError(
            f"{where}: backward(create_graph=True) reached {name}; the reduced .grad has no graph, so what is computed from it "
            "would lack its gradient. Use torch.autograd.grad(loss, parameters, create_graph=True), whose results have one."
        )

    def end_backward(self) -> None:
        """End the backward after its last node: compare with the other ranks, and reduce what is left. Collective.

        Where a backward runs through several engines, the last one to end publishes the gradients of all.
        """
        if transforms.running() is not None:
            transforms.outside(self.end_backward)
            return
        runtime = self.runtime
        self._tasks = set()
        try:
            runtime.schedule.end_backward()
            if self._reduces:
                runtime.reductions.compare()
            # An engine that waits for others keeps `_end`, so that it is abandoned if the graph task fails before they end.
            ended: list[Runtime] = runtime.engine_order.end(runtime)
            self._compare_order()
        except BaseException:
            self._abandon()
            raise
        for i, each in enumerate(ended):
            try:
                each.backwards._publish()
            except BaseException:
                for other in ended[i:]:
                    other.backwards._abandon()
                raise

    def _publish(self) -> None:
        """Wait for all reductions, publish `.grad`, and reshard; call when the ranks have agreed on what is reduced."""
        runtime, schedule = self.runtime, self.runtime.schedule
        self._end = None
        if self._reduces:
            runtime.reductions.flush()
            if runtime.in_backward is not None:
                runtime.in_backward.end()
                runtime.collectives.watchdog.note_step()
                runtime.versions.note_change()
                schedule.values_changed()
        else:
            for flat in runtime.flats:
                flat.gradients.show_deferred()
        schedule.double_backward = self._creates_graph
        for unit in runtime.units:
            unit.end_recomputation()
            unit.awaits_trigger = False
            unit.uses.clear()
            unit.kept.clear()
        # A frozen model, say a teacher, may never have a backward of its own after which to drop its secondary shards. If one
        # comes after all, it gathers from all ranks.
        for other in runtime.engine_order.engines:
            for unit in other.units:
                unit.drop_secondary_shards()
        schedule.reshard_unused()
        runtime.collectives.drop_spares()  # to save memory between steps; a backward allocates the buffers again
        if self._reduces:
            runtime.forward_order.clear()
            if not runtime.forwards.depth:
                runtime.session.close()

    def _compare_order(self) -> None:
        """Compare the order of collectives with the other ranks, if the backward ran through several engines. Collective."""
        runtime = self.runtime
        issued = runtime.engine_order.order()
        if issued is not None:
            runtime.operations.note(issued, f"has mixed the collectives of several models in the order {issued:x}")
            runtime.operations.check("the end of a backward through several models")

    def _abandon_after_failure(self) -> None:
        """Abandon the backward that runs, if any does, because the user's call of it is about to raise."""
        deadline = time.monotonic() + PAUSE
        while self._end is not None and self._end() is not None and time.monotonic() < deadline:
            time.sleep(0.001)  # a thread of a device may still be inside a hook
        try:
            self._abandon_if()
        except Exception:  # this must not replace the error of the backward
            logger.exception(
                "rank %d: cleaning up after a failed backward has failed, too",
                self.runtime.collectives.world_rank,
                extra=ANY_RANK,
            )

    def _abandon_if(self, end: weakref.ref[Any] | None = None) -> None:
        """Abandon the backward that runs, if any does; if `end` is given, only if it is the callback of this backward."""
        with self._abandoning:  # the thread of the call and a thread of a device may both come here
            if self._end is not None and (end is None or end is self._end):
                self._abandon()

    def _abandon(self) -> None:
        """Leave the engine as it was before a backward that has failed."""
        runtime = self.runtime
        self.failed = Moment.of(runtime)
        runtime.engine_order.abandon(runtime)
        self._end, self._tasks = None, set()
        runtime.reductions.abandon()
        runtime.schedule.double_backward = False
        for unit in runtime.units:
            with contextlib.suppress(ShardError):
                unit.end_recomputation()
            unit.uses.clear()
            unit.kept.clear()
            unit.awaits_trigger = False
            unit.drop_secondary_shards()
            for flat in unit.flats:
                flat.gradients.forget()
            if unit.state is not State.SHARDED and unit.gathers and not unit.running:
                with contextlib.suppress(ShardError):
                    if all(p.wait_at_most(PAUSE) for p in unit.pending):
                        runtime.schedule.reshard(unit)
                if unit.state is State.GATHERING:
                    # The unshard may never end. The memory stays allocated, since the collective may still write to it.
                    unit.pending, unit.state = [], State.SHARDED
        runtime.collectives.drop_spares()
        runtime.forward_order.clear()
        runtime.session.close()


def _queue(callback: Callable[[], None]) -> None:
    """Let autograd call `callback` when the running graph task has ended without an exception."""
    torch.autograd.Variable._execution_engine.queue_callback(callback)


def _made_by_forward(outputs: list[torch.Tensor]) -> list[torch.Tensor]:
    # One that is a leaf is an input passed through, which backward reaches when it has left the module.
    return [t for t in outputs if t.requires_grad and not t.is_leaf]


def _newer_nodes(tensors: list[torch.Tensor], end: int) -> bool:
    """Return True if the graph got nodes after those of `tensors`; `end` is the next sequence number."""
    # Reading `grad_fn` of a view whose base was edited makes a new node, whose number is `end` or more.
    return end - 1 not in [t.grad_fn._sequence_nr() for t in tensors if t.grad_fn is not None]  # type: ignore[attr-defined]
