"""Module hooks of a sharded model, and its running forwards.

A pre-hook on a unit's trigger modules unshards the unit and installs the unsharded parameters; the forward hook puts the
sharded parameters back. A unit is resharded when *another* unit's forward begins. So a unit with several triggers is not
unsharded twice, and the unit used last is still unsharded when backward starts with it.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import nn

from ..schedule.phases import BACKWARD, FORWARD, PHASES
from ..utils import transforms
from ..utils.autograd_private import graph_task, sequence_number
from ..utils.pytree import own_memory, tensors_in
from . import mixed_precision_hooks
from .interrupted_forwards import ended, forward_frame
from .load_hooks import note_load
from .out_of_memory import explain
from .use import Use

if TYPE_CHECKING:
    from ..unit.unit import Unit
    from .runtime import Runtime


class _Entered(NamedTuple):
    """A running forward of a unit's trigger module."""

    unit: Unit
    use: Use
    summoned: bool  # began inside gathered(), which had installed the unsharded parameters
    frame: FrameType | None
    handled: BaseException | None  # the error that the caller of the forward handles


class Forwards:
    """Unshards units before their forwards and hooks the forwards' outputs; one for each :class:`Runtime`."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.depth = 0  # running forwards of trigger modules, without those inside gathered()
        self._entered: list[_Entered] = []
        self._roots: list[FrameType | None] = []  # the Python frames of the root module's running forwards
        self._records = False  # autograd records the outermost of the running forwards
        self._refused = False  # the ranks have not begun the root module's forward that ends next, because of an error

    @property
    def running(self) -> bool:
        """True if a forward of the model or of one of its units is running."""
        return self.depth > 0 or bool(self._roots)

    @property
    def records(self) -> bool:
        """True if a forward is running that autograd records, though perhaps not at this moment.

        Reentrant checkpointing runs layers without gradients at first.
        """
        return self._records and self.running

    # -- of units -------------------------------------------------------------------------------------------------
    def enter(self, unit: Unit, module: nn.Module) -> None:
        """Begin the forward of `module`, which triggers `unit`. Collective."""
        if self._entered:
            self.leave_interrupted()
        runtime, use = self.runtime, Use(unit, sequence_number(), _looks_up(module))
        if unit.is_summoned:
            self._entered.append(_Entered(unit, use, True, forward_frame(), sys.exc_info()[1]))
            return
        if runtime.registrations.changed:
            runtime.check_registrations()
        phase = runtime.phase()
        if not self.running:
            self._records = phase == FORWARD
        try:
            runtime.unshard(unit, phase, "the model" if self._roots else f"{type(module).__name__} of {unit.name}")
        except BaseException as error:
            explain(runtime, error, PHASES[phase], unit)
            if not self.running:  # else the end of the outer forward does that
                runtime.session.end_read()
            raise
        if phase == BACKWARD and not unit.uses:
            # Recomputation of a checkpointed region that spans several units: the nodes that will read these values are
            # older than the ones being made now, so only this unit's own trigger may let the unit be resharded.
            unit.awaits_trigger = True
        unit.install()
        unit.running += 1
        self.depth += 1
        self._entered.append(_Entered(unit, use, False, forward_frame(), sys.exc_info()[1]))

    def exit(self, unit: Unit, outputs: Any) -> Any:
        """End the forward of a module that triggers `unit`; return what the module shall return.

        This is called also when the forward has raised; `outputs` is None then, as it may be where a forward returns nothing.
        """
        error = sys.exc_info()[1] if outputs is None else None
        entered = self._entered
        if unit not in [each.unit for each in entered]:
            explain(self.runtime, error, PHASES[self.runtime.phase()], unit)
            return outputs  # the pre-hook itself failed
        while True:
            last = entered.pop()
            self._leave(last)
            if last.unit is unit:  # an interrupt has skipped the hooks of the entries above
                break
        raised = error is not None and error is not last.handled
        if raised:
            explain(self.runtime, error, PHASES[self.runtime.phase()], unit)
        runtime, recording = self.runtime, torch.is_grad_enabled()
        tensors = [] if outputs is None else tensors_in(outputs)
        if last.summoned:
            if recording and not raised and all(call.in_place for call in unit.gathered_calls):
                runtime.backwards.watch_outputs(last.use, tensors)
            return outputs
        if unit.gathers and tensors:
            outputs, copies = own_memory(outputs, tensors, {f.storage for f in unit.flats})
            tensors = tensors_in(outputs) if copies else tensors
        if recording and not raised:
            runtime.backwards.watch_outputs(last.use, tensors)
        runtime.on_demand.check_copies()
        self.between(recording)
        return outputs

    def _leave(self, entered: _Entered) -> None:
        if not entered.summoned:
            self.depth -= 1
            entered.unit.running -= 1
            entered.unit.uninstall()

    def between(self, recording: bool) -> None:
        """Reshard units that are not needed any more, after an operation or a forward; `recording`: it recorded gradients."""
        if self.running or graph_task() != -1:
            return
        runtime = self.runtime
        if runtime.lone.running:
            runtime.session.end_read()
            return
        if not recording:
            runtime.schedule.reshard_after_evaluation()
            runtime.session.end_read()  # this rank may make the next read alone
        if runtime.schedule.keeps_on:  # the next forward must look for changes of the parameters
            runtime.session.close()

    # -- of the root module ---------------------------------------------------------------------------------------
    def begin(self, root: nn.Module) -> None:
        """Begin a forward of the root module. Collective where buffers have to be synchronised."""
        if self._roots:
            self.leave_interrupted()
        runtime = self.runtime
        if not self.running:
            self._records = runtime.phase() == FORWARD
        self._roots.append(forward_frame())
        if runtime.registrations.changed or runtime.registrations.root is None:
            runtime.registrations.root = weakref.ref(root)
            runtime.check_registrations()
        if self.depth == 0 and len(self._roots) == 1 and graph_task() == -1:
            runtime.session.begin_model()
            try:
                runtime.synchronise_buffers(root)
            except BaseException:
                self._refused = True
                raise

    def finish(self, outputs: Any) -> None:
        """End the innermost forward of the root module. Collective, unless the forward has raised or returns None.

        Raises:
            DivergenceError: other ranks have come to something else than this forward.
        """
        if outputs is None:
            explain(self.runtime, sys.exc_info()[1], PHASES[self.runtime.phase()])
        alone = self.runtime.lone.running
        if self._roots:
            self._roots.pop()
        self._finished()
        if outputs is not None and not self._roots and graph_task() == -1 and not alone:
            if self.runtime.replicates and torch.is_grad_enabled():
                self.runtime.backwards.watch_model(tensors_in(outputs))
            # Before the user's code waits for other ranks, or for the device. In a step that repeats, all have come long ago.
            self.runtime.operations.finish()

    def _finished(self) -> None:
        """Do what the end of a forward of the root module entails, the innermost or another one."""
        runtime = self.runtime
        refused, self._refused = self._refused, False
        if runtime.buffers is not None and not (runtime.solo or runtime.lone.running or refused):
            runtime.buffers.due = torch.is_grad_enabled() and runtime.require_sync
        if self.depth == 0 and graph_task() == -1:
            alone = runtime.lone.running
            runtime.session.end_model(alone)
            if not (torch.is_grad_enabled() or alone):
                runtime.schedule.reshard_unused()

    # -- after an interrupt ---------------------------------------------------------------------------------------
    def leave_interrupted(self) -> None:
        """Do what is left to do of a forward whose last hooks an interrupt has skipped. Not collective."""
        gone = ended([each.frame for each in self._entered], self._roots)
        if not gone:
            return
        for entered in [each for each in self._entered if each.frame in gone]:
            self._entered.remove(entered)
            self._leave(entered)
        for root in [frame for frame in self._roots if frame in gone]:
            self._roots.remove(root)
            self._finished()
        self.runtime.on_demand.check_copies()


# torch.compiler.disable, without importing the compiler here (the first optimizer does so anyway). Private; torch 2.13.
@torch._disable_dynamo  # type: ignore[attr-defined]
def uncompiled(function: Callable[..., Any], *args: Any) -> Any:
    """Call `function` without compiling it."""
    return function(*args)


# The reason in the error of torch.compile(fullgraph=True); private, too.
uncompiled._torchdynamo_disable = True  # type: ignore[attr-defined]
uncompiled._torchdynamo_disable_msg = (  # type: ignore[attr-defined]
    "torch_shard gathers and releases parameters here, which is done between graphs: each unit breaks the graph once. Leave out "
    "fullgraph=True, or compile modules that are smaller than a unit"
)


def _call(function: Callable[..., Any], *args: Any) -> Any:
    """Call `function`; inside a compiled module without compiling it, and outside of the transforms of ``torch.func``."""
    # The wrapper costs several microseconds, and is needed only while the compiler runs.
    if torch.compiler.is_dynamo_compiling():
        return uncompiled(function, *args)
    return function(*args) if transforms.running() is None else transforms.outside(function, *args)


def _enter_unit(runtime: Runtime, unit: Unit, module: nn.Module, args: Any) -> None:
    _call(runtime.forwards.enter, unit, module)


def _exit_unit(runtime: Runtime, unit: Unit, module: nn.Module, args: Any, output: Any) -> Any:
    return _call(runtime.forwards.exit, unit, output)


def _begin_model(runtime: Runtime, module: nn.Module, args: Any) -> None:
    _call(runtime.forwards.begin, module)


def _finish_model(runtime: Runtime, module: nn.Module, args: Any, output: Any) -> None:
    _call(runtime.forwards.finish, output)


def register(root: nn.Module, runtime: Runtime, units: Iterable[Unit]) -> None:
    """Hook the root module and every trigger module. The hooks are objects that are copied with the model."""
    runtime.registrations.root = weakref.ref(root)
    runtime.registrations.changed = False
    for unit in units:
        for module in unit.triggers:
            module.register_forward_pre_hook(partial(_enter_unit, runtime, unit), prepend=True)
            module.register_forward_hook(partial(_exit_unit, runtime, unit), always_call=True)
    root.register_forward_pre_hook(partial(_begin_model, runtime), prepend=True)
    root.register_forward_hook(partial(_finish_model, runtime), always_call=True)


def _looks_up(module: nn.Module) -> bool:
    """Return True for torch's embedding without code of the user's, which might keep memory of the weight."""
    if type(module) is not nn.Embedding or "forward" in module.__dict__:
        return False
    return all(map(is_own_hook, (*module._forward_hooks.values(), *module._forward_pre_hooks.values())))


_HOOKS = (_enter_unit, _exit_unit, _begin_model, _finish_model, note_load, *mixed_precision_hooks.HOOKS)


def is_own_hook(hook: Any) -> bool:
    """Return True for a hook that :func:`register`, or set-up beside it, has put on a module."""
    return getattr(hook, "func", None) in _HOOKS


def unregister(root: nn.Module, units: Iterable[Unit]) -> None:
    """Remove the engine's hooks from all modules, also from those of a copied model, for which there are no handles."""
    for module in {*root.modules(), *(trigger for unit in units for trigger in unit.triggers)}:
        for hooks in (module._forward_pre_hooks, module._forward_hooks, module._load_state_dict_post_hooks):
            for key, hook in list(hooks.items()):
                if is_own_hook(hook):
                    del hooks[key]
                    module._forward_pre_hooks_with_kwargs.pop(key, None)
                    module._forward_hooks_always_called.pop(key, None)
