"""The engine sees every optimizer step that changes its parameters, whoever calls it.

Gathered copies and graphs over them are out of date after a step, so they are dropped. What the step's arithmetic works on
is decided here: flat tensors (:mod:`.flat_step`), whole matrices at their owner, or the ShardTensors themselves.
"""

from __future__ import annotations

import inspect
import sys
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import optimizer as torch_optimizer

from .errors import ConfigError
from .flat_step import FlatStep
from .in_backward import InBackward
from .matrix_step import MatrixStep
from .optim import is_torchs, kind_of
from .shard_tensor import ShardTensor
from .stand_in import StandIn, Work, stand_in
from .step_checks import Trial, check_class, check_units, own_units, refuse_unreduced, shard_state

if TYPE_CHECKING:
    from .runtime import Runtime

_HOOK = tuple[tuple[Any, ...], dict[str, Any]]


class StepWatch:
    """Follows torch's global optimizer step hooks for one runtime; closed with its engine."""

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = weakref.ref(runtime)
        self._works: weakref.WeakKeyDictionary[Any, Work] = weakref.WeakKeyDictionary()
        self._trials: weakref.WeakKeyDictionary[Any, Trial] = weakref.WeakKeyDictionary()
        own = weakref.ref(self)

        def before(optimizer: Any, args: Any, kwargs: Any) -> _HOOK | None:
            alive = own()
            return None if alive is None else alive.before(optimizer, args, kwargs, sys._getframe(1))

        def after(optimizer: Any, args: Any, kwargs: Any) -> None:
            alive = own()
            if alive is not None:
                alive.after(optimizer, sys._getframe(1))

        self._handles = [
            torch_optimizer.register_optimizer_step_pre_hook(before),
            torch_optimizer.register_optimizer_step_post_hook(after),
        ]
        # A runtime that is dropped without close() must not leave a hook behind for the life of the process.
        for handle in self._handles:
            weakref.finalize(runtime, handle.remove)

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._works.clear()
        self._trials.clear()

    # -- around a step ------------------------------------------------------------------------------------------
    def before(self, optimizer: Any, args: Any, kwargs: Any, frame: Any) -> _HOOK | None:
        """A step is about to be called, from `frame`, with `args`; returns what it shall be given instead."""
        runtime = self._runtime()
        if runtime is None or isinstance(optimizer, StandIn) or not self._holds(optimizer, runtime):
            return None
        check_class(optimizer, runtime.collectives.world_rank)
        kind = kind_of(type(optimizer)) or _kind_of_function(type(optimizer), frame.f_locals.get("func"))
        if kind == "matrix":  # refuses on all ranks together
            return self._exchange(optimizer, args, kwargs, runtime, MatrixStep)
        if not _closure(args, kwargs):
            refuse_unreduced(optimizer, runtime)
        if kind == "elementwise":
            return self._exchange(optimizer, args, kwargs, runtime, FlatStep)
        return self._as_it_is(optimizer, args, kwargs, runtime, frame)

    def after(self, optimizer: Any, frame: Any) -> None:
        """The step has ended."""
        runtime = self._runtime()
        if runtime is None or isinstance(optimizer, StandIn) or not self._holds(optimizer, runtime):
            return
        work = self._works.get(optimizer)
        if work is not None:
            work.close()
        trial = self._trials.get(optimizer)
        if trial is not None and trial.frame is frame:
            trial.end()
            runtime.collectives.scalar.refused = None
        runtime.parameters_changed()

    def _holds(self, optimizer: Any, runtime: Runtime) -> bool:
        # An engine that is closed has none.
        return bool(runtime.units) and (optimizer in self._works or _steps(optimizer, runtime))

    def _exchange(
        self, optimizer: Any, args: Any, kwargs: Any, runtime: Runtime, kind: type[FlatStep] | type[MatrixStep]
    ) -> _HOOK:
        work = self._works.get(optimizer)
        if type(work) is not kind:
            work = self._works[optimizer] = kind(optimizer, runtime)
        other, session = stand_in(optimizer, work)
        args, kwargs = _replaced(args, kwargs, session.around)
        return (other, *args[1:]), kwargs

    def _as_it_is(self, optimizer: Any, args: Any, kwargs: Any, runtime: Runtime, frame: Any) -> _HOOK | None:
        """An optimizer that the engine does not know is given the ShardTensors."""
        check_units(optimizer, own_units(optimizer, runtime))
        # State that is whole at its owner belongs to a base class's step, which this one's calls.
        owned = isinstance(self._works.get(optimizer), MatrixStep)
        if not owned:
            shard_state(optimizer, runtime)
        _hook_bases(type(optimizer))
        trial = self._trials.setdefault(optimizer, Trial(optimizer))
        if not trial.runs():
            trial.begin(frame)
            runtime.collectives.scalar.refused = trial.explain

        def around(closure: Callable[[], Any]) -> Callable[[], Any]:
            def run() -> Any:
                result = closure()
                refuse_unreduced(optimizer, runtime)
                if not owned:
                    shard_state(optimizer, runtime)
                return result

            return run

        return _replaced(args, kwargs, around)

    # -- during backward --------------------------------------------------------------------------------------------
    def step_in_backward(self, optimizer: Any) -> None:
        """See :meth:`torch_shard.Engine.step_in_backward`."""
        runtime = self._runtime()
        assert runtime is not None
        if optimizer is None:
            runtime.in_backward = runtime.reductions.on_published = None
            return
        kind = kind_of(type(optimizer))
        if kind != "elementwise":
            raise ConfigError(
                f"step_in_backward: {type(optimizer).__qualname__} is not known to step element by element, so it can't step "
                "on a part of the model; use one of torch.optim's classes, or declare it: torch_shard.optim.register."
            )
        check_class(optimizer, runtime.collectives.world_rank)
        own_units(optimizer, runtime)
        runtime.in_backward = InBackward(optimizer, runtime)
        runtime.reductions.on_published = runtime.in_backward.step

    # -- optimizers that torch's hooks don't see -----------------------------------------------------------------
    def attach(self, optimizer: Any) -> None:
        """See :meth:`torch_shard.Engine.attach`."""
        for name in ("param_groups", "step"):
            if not hasattr(optimizer, name):
                raise ConfigError(f"attach: {type(optimizer).__name__} has no {name}, so it is not an optimizer.")
        function = type(optimizer).step
        if getattr(function, "hooked", False) and hasattr(optimizer, "_optimizer_step_pre_hooks"):
            return
        step = optimizer.step
        if getattr(step, "watch", None) is self:
            return

        def attached(*args: Any, **kwargs: Any) -> Any:
            func = function  # under the name that torch's wrapper has for it
            replaced = self.before(optimizer, (optimizer, *args), kwargs, sys._getframe())
            if replaced is None:
                result = step(*args, **kwargs)
            elif replaced[0][0] is optimizer:
                result = step(*replaced[0][1:], **replaced[1])
            else:
                result = func(*replaced[0], **replaced[1])
            self.after(optimizer, sys._getframe())
            return result

        attached.watch = self  # type: ignore[attr-defined]
        optimizer.step = attached


def _kind_of_function(cls: type, function: Any) -> str | None:
    """The kind of one of torch's own ``step`` functions, which a subclass has inherited or calls by ``super().step()``;
    `function` is what torch's wrapper (``Optimizer.profile_hook_step``, torch 2.11 to 2.13) will call."""
    if function is None:
        return None
    plain = inspect.unwrap(function)
    for base in cls.__mro__:
        if is_torchs(base) and kind_of(base) is not None and inspect.unwrap(base.step) is plain:  # type: ignore[attr-defined]
            same = getattr(cls, "_init_group", None) is getattr(base, "_init_group", None)
            return kind_of(base) if same else None
    return None


def _hook_bases(cls: type) -> None:
    """torch calls hooks for the classes of which there was an optimizer: let it do so for those that this one's ``step`` may
    call by ``super()``."""
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


def _closure(args: Any, kwargs: Any) -> Any:
    return kwargs.get("closure", args[1] if len(args) > 1 else None)


def _replaced(args: Any, kwargs: Any, around: Callable[[Any], Any]) -> _HOOK:
    """The arguments of a step with its closure, if there is one, replaced."""
    closure = _closure(args, kwargs)
    if closure is None:
        return args, kwargs
    if "closure" in kwargs:
        return args, {**kwargs, "closure": around(closure)}
    return (args[0], around(closure), *args[2:]), kwargs


def _steps(optimizer: Any, runtime: Runtime) -> bool:
    """Whether the optimizer holds a parameter of this runtime; groups are looked at until one answers."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if isinstance(p, ShardTensor):
                unit = p._unit_ref() if p._unit_ref is not None else None
                if unit is not None and unit.runtime is runtime:
                    return True
    return False
