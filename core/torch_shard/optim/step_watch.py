"""The engine sees every optimizer step that changes its parameters, whoever calls it.

Gathered copies and graphs over them are out of date after a step, so they are dropped. What the step's arithmetic works on
is decided here: flat tensors (:mod:`.optim.elementwise.step`), whole matrices at their owner, or the ShardTensors themselves.
"""

from __future__ import annotations

import sys
import types
import weakref
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import optimizer as torch_optimizer

from ..errors import ConfigError, ShardError
from ..utils.weak_id_map import ByObject
from .checks import (
    check_class,
    check_units,
    refuse_offloaded,
    refuse_others,
    refuse_unreduced,
    refuse_without_rounding,
    shard_state,
    units_of,
)
from .elementwise.step import FlatStep
from .engines_of_optimizer import OPEN, first_runtime, runtimes_of
from .host.step import HostStep, refuse_disk, steps_on_host
from .matrix.multi_engine import MatrixSteps
from .matrix.step import MatrixStep
from .optimizer_proxy import Session, StandIn, stand_in
from .registry import Kind, is_torchs, kind_of, kind_of_step
from .step_in_backward import InBackward
from .trial_step import Trial

if TYPE_CHECKING:
    from ..runtime.runtime import Runtime

_Arguments = tuple[tuple[Any, ...], dict[str, Any]]
_Work = FlatStep | HostStep | MatrixStep | MatrixSteps


@dataclass(eq=False)
class _Running:
    """A step that has begun.

    Attributes:
        optimizer: whose it is.
        frame: id of the frame that has called it. (The frame itself would keep the optimizer.)
        session: with the stand-in, where there is one.
        trial: of an optimizer that the engine does not know.
        runtimes: whose parameters it holds.
    """

    optimizer: weakref.ref[Any]
    frame: int
    session: Session | None
    trial: Trial | None
    runtimes: tuple[weakref.ref[Runtime], ...]

    def runs_in(self, frame: Any) -> bool:
        if id(frame) != self.frame:
            return False
        # Ids of frames are used again. Under these names torch's wrapper and that of `attach` have the optimizer.
        optimizer = self.optimizer()
        return optimizer is not None and any(frame.f_locals.get(name) is optimizer for name in ("self", "this"))


class StepWatch:
    """Follows optimizers' steps for one runtime; closed with its engine.

    torch's global pre-hook finds the optimizers. What is done around a step is done in hooks of the optimizer's own: the last
    one before it and the first one behind it, so that all others see the optimizer as it is.

    Of an optimizer that holds several engines' parameters the first one's watch *leads*: it does all that is done around the
    step. The others know of its work, and of the step while it runs.
    """

    def __init__(self, runtime: Runtime) -> None:
        self._runtime = weakref.ref(runtime)
        runtime.steps = weakref.ref(self)
        OPEN.add(runtime)
        self._works: ByObject[_Work] = ByObject()
        self._trials: ByObject[Trial] = ByObject()
        self._hooks: ByObject[tuple[Any, Any, Any]] = ByObject()
        self._running: list[_Running] = []  # steps, the innermost last; those that have failed leave nothing here
        self._kinds: dict[type, type] = {}  # classes of stand-ins
        own = weakref.ref(self)

        def found(optimizer: Any, args: Any, kwargs: Any) -> None:
            alive = own()
            if alive is not None:
                alive.find(optimizer)

        self._handle = torch_optimizer.register_optimizer_step_pre_hook(found)
        # A runtime that is dropped without close() must not leave a hook behind for the life of the process.
        weakref.finalize(runtime, self._handle.remove)

    def close(self) -> None:
        runtime = self._runtime()
        if runtime is not None:
            OPEN.discard(runtime)
        self._handle.remove()
        for handles in self._hooks.values():
            for handle in handles:
                handle.remove()
        for work in self._works.values():
            work.forget()  # user code may still refer to a step's stand-in, and by that to the engine
        for store in (self._works, self._trials, self._hooks):
            store.clear()
        self._running = []

    # -- around a step ------------------------------------------------------------------------------------------
    def find(self, optimizer: Any) -> None:
        """A step begins: have :meth:`before` and :meth:`after` called next to it."""
        runtime = self._runtime()
        if runtime is None or isinstance(optimizer, StandIn) or not self._leads(optimizer, runtime):
            return
        handles = self._hooks.get(optimizer)
        if handles is None:
            own = weakref.ref(self)

            def before(optimizer: Any, args: Any, kwargs: Any) -> _Arguments | None:
                alive, frame = own(), sys._getframe(1)
                return (
                    None if alive is None else alive.before(optimizer, args, kwargs, frame, frame.f_locals.get("func"))
                )

            def after(optimizer: Any, args: Any, kwargs: Any) -> None:
                alive = own()
                if alive is not None:
                    alive.after(optimizer, sys._getframe(1))

            def loaded(optimizer: Any) -> None:
                alive = own()
                if alive is not None:
                    alive.loaded(optimizer)

            handles = (
                optimizer.register_step_pre_hook(before),
                optimizer.register_step_post_hook(after),
                optimizer.register_load_state_dict_post_hook(loaded),
            )
            self._hooks.set(optimizer, handles)
        # torch has no public way to say where in the order a hook comes (torch 2.11 to 2.13).
        optimizer._optimizer_step_pre_hooks.move_to_end(handles[0].id)
        optimizer._optimizer_step_post_hooks.move_to_end(handles[1].id, last=False)

    def before(self, optimizer: Any, args: Any, kwargs: Any, frame: Any, function: Any) -> _Arguments | None:
        """`function` is about to be called with `args`, from `frame`; returns what it shall be given instead."""
        runtime = self._runtime()
        if runtime is None or isinstance(optimizer, StandIn) or not self._leads(optimizer, runtime):
            return None
        if _under_compiler():
            raise ShardError(
                f"rank {runtime.collectives.world_rank}: {type(optimizer).__name__}.step() is called from code under "
                "torch.compile, which can't compile a step on a sharded model. Leave the step out of what is compiled. Nothing "
                "was changed."
            )
        check_class(optimizer, runtime.collectives.world_rank)
        kind = kind_of(type(optimizer)) or kind_of_step(type(optimizer), function)
        runtimes = runtimes_of(optimizer) or [runtime]
        refuse_offloaded(optimizer, runtimes, kind == "matrix")
        refuse_disk(optimizer, runtimes, kind)
        if kind is None:
            return self._as_it_is(optimizer, args, kwargs, runtimes, frame)
        # What works on whole matrices refuses on all ranks together.
        return self._exchange(optimizer, args, kwargs, runtimes, frame, kind, function)

    def after(self, optimizer: Any, frame: Any) -> None:
        """The step has ended."""
        runtime = self._runtime()
        if runtime is None or isinstance(optimizer, StandIn) or not self._leads(optimizer, runtime):
            return
        step = self._ended(optimizer, frame)
        if step is not None and step.session is not None:
            step.session.end()
        for stepped in runtimes_of(optimizer) or [runtime]:
            stepped.parameters_changed()
        if step is not None and step.trial is not None:
            step.trial.end()

    def loaded(self, optimizer: Any) -> None:
        """Its ``load_state_dict`` was called."""
        runtime, work = self._runtime(), self._works.get(optimizer)
        if runtime is None or work is None:
            return
        work.forget()  # the state that there was
        name = type(optimizer).__name__
        for held in runtimes_of(optimizer) or [runtime]:
            if held.agreement is not None:  # on some ranks only it would mix old and new state
                held.agreement.note(zlib.crc32(name.encode()), f"{name}.load_state_dict()")

    # -- the steps that run -----------------------------------------------------------------------------------------
    def _begins(self, step: _Running, frame: Any) -> None:
        """`step` begins in `frame`, inside those that run already. A step that has failed has told nobody, so whether one
        still runs is seen on the stack."""
        outer: list[_Running] = []
        for watch, runtime in _watches(step):
            inside = watch._on_stack(frame.f_back)
            watch._running = [*inside, step]
            outer += [s for s in inside if s not in outer]
            trials = any(s.trial is not None for s in watch._running)
            runtime.collectives.scalar.unknown_step = watch if trials else None
        for s in outer:
            if s.session is not None:
                s.session.pause()

    def _on_stack(self, frame: Any) -> list[_Running]:
        """The steps that `frame` is inside of, the innermost last."""
        found: list[_Running] = []
        while frame is not None and len(found) < len(self._running):
            found += [step for step in self._running if step.runs_in(frame)]
            frame = frame.f_back
        return found[::-1]

    def _ended(self, optimizer: Any, frame: Any) -> _Running | None:
        """The step that ends in `frame`, with no exception; those inside it have failed."""
        for i, step in reversed(list(enumerate(self._running))):
            if step.frame == id(frame) and step.optimizer() is optimizer:
                del self._running[i:]
                for watch, runtime in _watches(step):
                    if step in watch._running:
                        del watch._running[watch._running.index(step) :]
                    if not any(s.trial is not None for s in watch._running):
                        runtime.collectives.scalar.unknown_step = None
                return step
        return None

    def runs(self) -> bool:
        """Whether the step of an optimizer that the engine does not know runs now."""
        return any(step.trial is not None for step in self._on_stack(sys._getframe(1)))

    def refuse(self, message: str) -> str:
        """An operation that sharded parameters can't do is refused: undo the steps of unknown optimizers that run now."""
        trials = [step.trial for step in self._on_stack(sys._getframe(1)) if step.trial is not None]
        for trial in reversed(trials):
            trial.undo()
        return trials[-1].explain(message) if trials else message

    def _leads(self, optimizer: Any, runtime: Runtime) -> bool:
        if not runtime.units:  # closed
            return False
        first = first_runtime(optimizer)
        # Whose parameters it has held is asked as well: other ranks may still wait for a step on whole matrices.
        return first is runtime if first is not None else self._hooks.get(optimizer) is not None

    def _exchange(
        self,
        optimizer: Any,
        args: Any,
        kwargs: Any,
        runtimes: list[Runtime],
        frame: Any,
        kind: Kind,
        function: Any,
    ) -> _Arguments:
        work = self._works.get(optimizer)
        if work is None or not _suits(work, kind, runtimes):
            if kind == "elementwise" and steps_on_host(optimizer, runtimes):
                work = HostStep(optimizer, runtimes[0])
            elif kind == "elementwise":
                work = FlatStep(optimizer, runtimes[0])
            else:
                work = MatrixStep(optimizer, runtimes[0]) if len(runtimes) == 1 else MatrixSteps(optimizer, runtimes)
        step = _Running(weakref.ref(optimizer), id(frame), None, None, tuple(map(weakref.ref, runtimes)))
        for watch, _ in _watches(step):
            if watch._works.get(optimizer) is not work:
                watch._works.set(optimizer, work)  # which forgets when any of the engines is closed
        if isinstance(work, HostStep):
            work.call(function.__wrapped__ if getattr(function, "hooked", False) else function)
        other, step.session = stand_in(optimizer, work, self._kinds)
        session = step.session
        self._begins(step, frame)
        args, kwargs = _replaced(args, kwargs, session.around)
        return (other, *args[1:]), kwargs

    def _as_it_is(self, optimizer: Any, args: Any, kwargs: Any, runtimes: list[Runtime], frame: Any) -> _Arguments:
        """An optimizer that the engine does not know is given the ShardTensors."""
        # State that is whole at its owner belongs to a base class's step, which this one's calls.
        owned = isinstance(self._works.get(optimizer), (MatrixStep, MatrixSteps))

        def prepare() -> None:
            for runtime in runtimes:
                refuse_unreduced(optimizer, runtime)
            if not owned:
                for runtime in runtimes:
                    shard_state(optimizer, runtime)

        for runtime in runtimes:
            refuse_without_rounding(optimizer, runtime)
        check_units(optimizer, units_of(optimizer))
        if not _closure(args, kwargs):
            prepare()
        elif not owned:
            for runtime in runtimes:
                shard_state(optimizer, runtime)
        _hook_bases(type(optimizer))
        trial = self._trials.get(optimizer)
        if trial is None:
            trial = Trial(optimizer)
            self._trials.set(optimizer, trial)
        step = _Running(weakref.ref(optimizer), id(frame), None, trial, tuple(map(weakref.ref, runtimes)))
        self._begins(step, frame)
        if any(s.trial is trial for s in self._running[:-1]):
            step.trial = None  # called by the class's own with super()
        else:
            trial.begin()

        def around(closure: Callable[[], Any]) -> Callable[[], Any]:
            def run() -> Any:
                result = closure()
                prepare()
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
        if runtime.in_backward is not None and runtime.in_backward.optimizer is not optimizer:
            raise ConfigError(
                f"step_in_backward: {type(runtime.in_backward.optimizer).__qualname__} steps in backward already; use one "
                "optimizer with several groups, or end it first: engine.step_in_backward(None)."
            )
        check_class(optimizer, runtime.collectives.world_rank)
        refuse_others(optimizer, runtime, "step_in_backward: ")
        refuse_disk(optimizer, [runtime], kind)
        runtime.in_backward = InBackward(optimizer, runtime)
        runtime.reductions.on_published = runtime.in_backward.step

    # -- optimizers that torch's hooks don't see -----------------------------------------------------------------
    def attach(self, optimizer: Any) -> None:
        """See :meth:`torch_shard.Engine.attach`."""
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

        def attached(this: Any, *args: Any, **kwargs: Any) -> Any:
            frame, replaced = sys._getframe(), (this, *args)
            # Of the engine that shards its parameters now; this one may be closed, or another one lead.
            runtime = first_runtime(this)
            watch = runtime.steps() if runtime is not None and runtime.steps is not None else None
            if watch is not None:
                replaced, kwargs = watch.before(this, replaced, kwargs, frame, function) or (replaced, kwargs)
            result = step(*replaced[1:], **kwargs) if patched and this is optimizer else function(*replaced, **kwargs)
            if watch is not None:
                watch.after(this, frame)
            return result

        attached.attached = True  # type: ignore[attr-defined]
        # A bound method, as schedulers expect, and as copying takes along to the copy.
        optimizer.step = types.MethodType(attached, optimizer)


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


def _under_compiler() -> bool:
    """Whether dynamo would compile the functions that are called now (torch 2.11 to 2.13)."""
    callback = getattr(torch._C._dynamo.eval_frame, "get_eval_frame_callback", None)
    return callback is not None and callable(callback())


def _closure(args: Any, kwargs: Any) -> Any:
    return kwargs.get("closure", args[1] if len(args) > 1 else None)


def _replaced(args: Any, kwargs: Any, around: Callable[[Any], Any]) -> _Arguments:
    """The arguments of a step with its closure, if there is one, replaced."""
    closure = _closure(args, kwargs)
    if closure is None:
        return args, kwargs
    if "closure" in kwargs:
        return args, {**kwargs, "closure": around(closure)}
    return (args[0], around(closure), *args[2:]), kwargs


def _watches(step: _Running) -> list[tuple[StepWatch, Runtime]]:
    """Those that a step concerns, with their runtimes."""
    runtimes = [ref() for ref in step.runtimes]
    found = [(r.steps(), r) for r in runtimes if r is not None and r.steps is not None]
    return [(watch, runtime) for watch, runtime in found if watch is not None]


def _suits(work: _Work, kind: Kind, runtimes: list[Runtime]) -> bool:
    if isinstance(work, FlatStep):  # which looks for itself
        return kind == "elementwise"
    if isinstance(work, HostStep):
        return kind == "elementwise" and [work.runtime] == runtimes
    return kind == "matrix" and work.runtimes == runtimes
