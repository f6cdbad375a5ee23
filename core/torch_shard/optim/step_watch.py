"""The hooks by which an engine sees every optimizer step that changes its parameters, wherever it is called.

After a step, gathered copies and graphs over them are out of date. What the step's arithmetic works on is decided here: flat
tensors (:mod:`.elementwise.step`), full matrices at their owners (:mod:`.matrix.step`), or the ShardTensors themselves.
"""

from __future__ import annotations

import functools
import sys
import types
import weakref
import zlib
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import optimizer as torch_optimizer
from torch.utils.weak import WeakIdKeyDictionary

from ..errors import ConfigError, ShardError
from ..shard_tensor.changes import StateOf
from ..shard_tensor.spec import same_cut
from ..shard_tensor.tensor import ShardTensor
from .checks import (
    check_class,
    check_units,
    refuse_others,
    refuse_unreduced,
    refuse_without_rounding,
    shard_state,
    units_of,
)
from .elementwise.step import FlatStep
from .engines_of_optimizer import OPEN, first_runtime, open_runtime_of, params_of, runtimes_of
from .host.step import HostStep, refuse_offloaded, steps_on_host
from .matrix.state import OwnedState, is_matrix
from .matrix.step import MatrixStep
from .optimizer_proxy import OptimizerProxy, StepBackend, proxy_of
from .registry import Kind, is_torchs, kind_of, kind_of_step
from .running_steps import UnknownSteps, attached_step, steps_on_stack
from .step_in_backward import InBackward

if TYPE_CHECKING:
    from ..runtime.runtime import Runtime

_Arguments = tuple[tuple[Any, ...], dict[str, Any]]


@dataclass
class _Hooks:
    """The hooks of one optimizer.

    Attributes:
        handles: their handles, the one before a step and the one after it first.
        noted: when :func:`_note_params` was called last: the number of restarts of versions, and that of the optimizer's groups.
    """

    handles: tuple[Any, ...]
    noted: tuple[int, int] | None = None


class StepWatch:
    """The part of an engine that follows optimizers' steps; closed with the engine.

    torch's global pre-hook finds the optimizers. The work around a step is done in hooks of the optimizer's own: the last
    one before the step and the first one after it, so that all others see the optimizer as it is.

    If an optimizer holds several engines' parameters, the watch of the first engine *leads*: it does all the work around the
    step. The others keep the same backend.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = weakref.ref(runtime)
        runtime.steps = weakref.ref(self)
        OPEN.add(runtime)
        self._backends: MutableMapping[Any, StepBackend] = WeakIdKeyDictionary()
        self._hooks: MutableMapping[Any, _Hooks] = WeakIdKeyDictionary()
        self._unknown = UnknownSteps()
        self._classes: dict[type, type] = {}  # of proxies
        _watch_steps()

    def close(self) -> None:
        """Stop following steps."""
        runtime = self._runtime()
        if runtime is not None:
            OPEN.discard(runtime)
        for hooks in self._hooks.values():
            for handle in hooks.handles:
                handle.remove()
        for backend in self._backends.values():
            backend.forget()  # user code may still refer to a step's proxy, and by that to the engine
        self._backends.clear()
        self._hooks.clear()

    # -- around a step ------------------------------------------------------------------------------------------
    def find(self, optimizer: Any) -> None:
        """Arrange calls of :meth:`before` and :meth:`after` next to a step that begins."""
        runtime = self._led(optimizer)
        if runtime is None:
            return
        hooks = self._hooks.get(optimizer)
        if hooks is None:
            handles = (
                optimizer.register_step_pre_hook(_weakly(self._hook_before)),
                optimizer.register_step_post_hook(_weakly(self.after)),
                optimizer.register_load_state_dict_pre_hook(_weakly(self.loading)),
                optimizer.register_load_state_dict_post_hook(_weakly(self.loaded)),
                optimizer.register_state_dict_post_hook(_weakly(self.mark_state)),
            )
            hooks = self._hooks[optimizer] = _Hooks(handles)
        lists = runtime.versions.restarts, len(optimizer.param_groups)
        if hooks.noted != lists:
            hooks.noted = lists
            _note_params(optimizer)
        # torch has no public way to say where in the order a hook comes (torch 2.11 to 2.13).
        optimizer._optimizer_step_pre_hooks.move_to_end(hooks.handles[0].id)
        optimizer._optimizer_step_post_hooks.move_to_end(hooks.handles[1].id, last=False)

    def _hook_before(self, optimizer: Any, args: Any, kwargs: Any) -> _Arguments | None:
        frame = sys._getframe(2)  # of torch's wrapper of ``step``, which has called the hook that `_weakly` made
        return self.before(optimizer, args, kwargs, frame.f_locals.get("func"), frame.f_back)

    def before(self, optimizer: Any, args: Any, kwargs: Any, function: Any, frame: Any) -> _Arguments | None:
        """Begin a step: `function` is about to be called with `args`, within `frame`.

        Returns:
            The arguments to call it with instead; None for the same.
        """
        runtime = self._led(optimizer)
        if runtime is None:
            return None
        if _under_compiler():
            raise ShardError(
                f"rank {runtime.collectives.world_rank}: {type(optimizer).__name__}.step() is called from code under "
                "torch.compile, which can't compile a step on a sharded model. Leave the step out of what is compiled. Nothing "
                "was changed."
            )
        check_class(optimizer, runtime.collectives.world_rank)
        kind = kind_of_step(type(optimizer), function)
        runtimes = runtimes_of(optimizer) or [runtime]
        for held in runtimes:
            held.await_votes()
        refuse_offloaded(optimizer, runtimes, kind)

        def pause() -> None:  # the closure of a step runs forward and backward, which change no parameters
            for held in runtimes:
                held.versions.pause_change()

        def resume() -> None:
            for held in runtimes:
                held.versions.begin_change()

        if kind is None:
            changed = _replaced(*self._step_on_shards(optimizer, args, kwargs, runtimes), before=pause, after=resume)
        else:  # a step on full matrices is refused on all ranks together
            # The proxy's pause comes first, which still writes to the shards.
            args, kwargs = _replaced(args, kwargs, before=pause, after=resume)
            changed = self._step_on_proxy(optimizer, args, kwargs, runtimes, kind, function)
        for outer in reversed(list(steps_on_stack(frame))):
            if isinstance(outer, OptimizerProxy) and any(held in runtimes for held in outer._session.backend.runtimes):
                outer._session.pause()
        for held in runtimes:
            held.served.add(optimizer)
        resume()
        return changed

    def after(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        """End a step that was called with `args`: the user's, or those that :meth:`before` has returned."""
        runtime = self._led(optimizer)
        if runtime is None:
            return
        if isinstance(args[0], OptimizerProxy):
            args[0]._session.end()
            runtimes = args[0]._session.backend.runtimes
        else:
            runtimes = runtimes_of(optimizer) or [runtime]
        for held in runtimes:
            held.parameters_changed()
            held.collectives.watchdog.note_step()
        self._unknown.end(optimizer)

    def loading(self, optimizer: Any, state_dict: Any) -> None:
        """Wait until no partner reads the state, which the optimizer's ``load_state_dict`` is about to replace."""
        for held in runtimes_of(optimizer):
            held.versions.begin_change()

    def loaded(self, optimizer: Any) -> None:
        """Drop what was kept of the state: the optimizer's ``load_state_dict`` has replaced it."""
        for held in runtimes_of(optimizer):
            held.served.add(optimizer)
            held.versions.end_change()
        runtime, backend = self._runtime(), self._backends.get(optimizer)
        if runtime is None or backend is None:
            return
        backend.forget()
        name = type(optimizer).__name__
        for held in runtimes_of(optimizer) or [runtime]:
            # A call on some ranks only would mix old and new state.
            held.operations.note(zlib.crc32(name.encode()), f"{name}.load_state_dict()")

    def mark_state(self, optimizer: Any, state_dict: Any) -> None:
        """Note on the sharded state in a state dict what it is, so that a rank alone may write it to a file."""
        runtime = self._runtime()
        if runtime is None:
            return
        if is_matrix(runtime, optimizer):
            c = runtime.collectives
            if c.world > 1:
                state_dict["state"] = owned = OwnedState(state_dict["state"])
                owned.refusal = (
                    f"rank {c.world_rank}: pickling (torch.save) the state of {type(optimizer).__name__} would save only the "
                    f"matrices that this rank owns. {c.watchdog.saving_advice}"
                )
            return
        params = params_of(optimizer)
        for number, entries in state_dict["state"].items():
            param = params[number] if isinstance(number, int) and number < len(params) else None
            held = open_runtime_of(param)
            if held is None or not isinstance(param, ShardTensor) or not isinstance(entries, dict):
                continue
            unit_ref: Any = param._unit_ref
            for key, value in entries.items():
                if isinstance(value, ShardTensor) and isinstance(key, str) and same_cut(value._spec, param._spec):
                    value._shard_state.state_of = StateOf(unit_ref, held.optimizer_states.part_of(param, key))

    def _led(self, optimizer: Any) -> Runtime | None:
        """Return the runtime if this watch leads the steps of `optimizer`."""
        runtime = self._runtime()
        if runtime is None or not runtime.units or isinstance(optimizer, OptimizerProxy):
            return None
        first = first_runtime(optimizer)
        # An optimizer that has lost its parameters is led by the watch that has seen it with some, because other ranks may
        # still wait for a step on full matrices.
        leads = first is runtime if first is not None else self._hooks.get(optimizer) is not None
        return runtime if leads else None

    def _step_on_proxy(
        self, optimizer: Any, args: Any, kwargs: Any, runtimes: list[Runtime], kind: Kind, function: Any
    ) -> _Arguments:
        """Return the arguments with a proxy in place of `optimizer`."""
        backend = self._backends.get(optimizer)
        if backend is None or not _suits(backend, kind, runtimes):
            if kind == "elementwise" and steps_on_host(optimizer, runtimes):
                backend = HostStep(optimizer, runtimes[0])
            elif kind == "elementwise":
                backend = FlatStep(optimizer, runtimes[0])
            else:
                backend = MatrixStep(optimizer, runtimes)
        for runtime in runtimes:
            watch = runtime.steps()
            if watch is not None and watch._backends.get(optimizer) is not backend:
                watch._backends[optimizer] = backend  # any of the watches, when it is closed, has it forget
        if isinstance(backend, HostStep):
            backend.units.function = function.__wrapped__ if getattr(function, "hooked", False) else function
        proxy, session = proxy_of(optimizer, backend, self._classes)
        args, kwargs = _replaced(args, kwargs, before=session.pause)
        return (proxy, *args[1:]), kwargs

    def _step_on_shards(self, optimizer: Any, args: Any, kwargs: Any, runtimes: list[Runtime]) -> _Arguments:
        """Prepare the step of an optimizer that the engine does not know, which gets the ShardTensors."""

        def check() -> None:
            for runtime in runtimes:
                refuse_unreduced(optimizer, runtime)

        for runtime in runtimes:
            refuse_without_rounding(optimizer, runtime)
        check_units(optimizer, units_of(optimizer))
        if not _closure(args, kwargs):
            check()
        for runtime in runtimes:
            # State that is full at its owner belongs to the step of a base class, which this class's step calls.
            if not isinstance(self._backends.get(optimizer), MatrixStep):
                shard_state(optimizer, runtime)
            runtime.collectives.scalar.unknown_step = self._unknown
        _hook_bases(type(optimizer))
        self._unknown.begin(optimizer)
        return _replaced(args, kwargs, after=check)

    # -- during backward --------------------------------------------------------------------------------------------
    def step_in_backward(self, optimizer: Any) -> None:
        """Do what :meth:`torch_shard.Engine.step_in_backward` says."""
        runtime = self._runtime()
        assert runtime is not None
        if optimizer is None:
            runtime.in_backward = None
            return
        kind = kind_of(type(optimizer))
        if kind != "elementwise":
            raise ConfigError(
                f"step_in_backward: {type(optimizer).__qualname__} is not known to step element by element, so it can't step "
                "on a part of the model; use one of torch.optim's classes, or declare it: torch_shard.optim.register."
            )
        if runtime.in_backward is not None and runtime.in_backward.optimizer is not optimizer:
            raise ConfigError(
                f"step_in_backward: {type(runtime.in_backward.optimizer).__qualname__} steps in backward already; use one "
                "optimizer with several groups, or end it first: engine.step_in_backward(None)."
            )
        check_class(optimizer, runtime.collectives.world_rank)
        refuse_others(optimizer, runtime, "step_in_backward: ")
        refuse_offloaded(optimizer, [runtime], kind)
        _note_params(optimizer)
        runtime.in_backward = InBackward(optimizer, runtime)

    # -- optimizers that torch's hooks don't see -----------------------------------------------------------------
    def attach(self, optimizer: Any) -> None:
        """Do what :meth:`torch_shard.Engine.attach` says."""
        cls = type(optimizer)
        for name in ("param_groups", "state", "step"):
            if not hasattr(optimizer, name):
                raise ConfigError(f"attach: {cls.__name__} has no {name}, so it is not an optimizer.")
        function: Any = cls.step  # type: ignore[attr-defined]
        if getattr(function, "hooked", False) and hasattr(optimizer, "_optimizer_step_pre_hooks"):
            return
        step, patched = optimizer.step, "step" in vars(optimizer)
        if getattr(step, "attached", False):
            return
        if patched and kind_of(cls) is not None:
            raise ConfigError(
                f"attach: the step of this {cls.__name__} has been replaced (by a learning-rate scheduler, perhaps), and the "
                "replacement would not be called. Attach the optimizer first."
            )
        called = function
        if patched:  # by a method, which a deep copy binds to itself, or by any other function
            own = getattr(step, "__self__", None) is optimizer
            called = step.__func__ if own else lambda _, *args, **kwargs: step(*args, **kwargs)
        # A bound method, because schedulers expect one, and because a deep copy then gets its own.
        optimizer.step = types.MethodType(attached_step(function, called), optimizer)


def _note_params(optimizer: Any) -> None:
    """Note which parameters an optimizer steps; at the next forward the ranks find whether they are the same. Not collective.

    A rank steps its own shards only, so that a parameter that not all ranks list would be stepped in part.
    """
    for runtime in runtimes_of(optimizer):
        if runtime.collectives.size > 1:
            own = (p for p in params_of(optimizer) if open_runtime_of(p) is runtime)
            runtime.versions.note_optimizer(p._spec.name for p in own)


@functools.cache
def _watch_steps() -> None:
    """Have torch tell the open engines of each optimizer's step; once, for the life of the process.

    A hook for each engine would go with its engine, which the garbage collector may drop while torch goes through its hooks.
    """
    torch_optimizer.register_optimizer_step_pre_hook(_tell_open_engines)


def _tell_open_engines(optimizer: Any, args: Any, kwargs: Any) -> None:
    for runtime in list(OPEN):
        watch = runtime.steps()
        if watch is not None:
            watch.find(optimizer)


def _weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a hook that calls `method` as long as its object is alive, and does not keep that alive."""
    ref = weakref.WeakMethod(method)

    def hook(*args: Any) -> Any:
        alive = ref()
        return None if alive is None else alive(*args)

    return hook


def _hook_bases(cls: type) -> None:
    """Make torch call step hooks for the base classes of `cls`, whose ``step`` it may call by ``super()``.

    torch itself does that for classes that have had an instance.
    """
    for base in cls.__mro__[1:]:
        step = base.__dict__.get("step")
        if (
            step is not None
            and is_torchs(base)
            and base is not torch.optim.Optimizer
            and not getattr(step, "hooked", False)
        ):
            hooked: Any = torch.optim.Optimizer.profile_hook_step(step)
            hooked.hooked = True
            base.step = hooked  # type: ignore[attr-defined]


def _under_compiler() -> bool:
    """Return True if dynamo would compile the functions that are called now (torch 2.11 to 2.13)."""
    callback = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", None)
    return callback is not None and callable(callback())


def _closure(args: Any, kwargs: Any) -> Any:
    return kwargs.get("closure", args[1] if len(args) > 1 else None)


def _replaced(
    args: Any, kwargs: Any, *, before: Callable[[], None] = lambda: None, after: Callable[[], None] = lambda: None
) -> _Arguments:
    """Return the arguments of a step with calls of `before` and `after` around its closure, if there is one."""
    closure = _closure(args, kwargs)
    if closure is None:
        return args, kwargs

    def run() -> Any:
        before()
        result = closure()
        after()
        return result

    if "closure" in kwargs:
        return args, {**kwargs, "closure": run}
    return (args[0], run, *args[2:]), kwargs


def _suits(backend: StepBackend, kind: Kind, runtimes: list[Runtime]) -> bool:
    if type(backend) is FlatStep:  # which follows changes of the runtimes itself
        return kind == "elementwise"
    return kind == ("matrix" if isinstance(backend, MatrixStep) else "elementwise") and backend.runtimes == runtimes
