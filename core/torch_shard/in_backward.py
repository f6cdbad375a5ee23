"""Stepping during backward: each unit's parameters as soon as their gradients are reduced.

Gradients are gone again before those of the next but one unit arrive, so that no rank ever holds more than two units' of
them. (LOMO, arXiv 2306.09782, does so for SGD; torch's post-accumulate hooks for one optimizer per parameter.)
"""

from __future__ import annotations

import gc
import sys
import weakref
from typing import TYPE_CHECKING, Any

import torch

from .errors import ShardError
from .flat_buffer import FlatBuffer
from .flat_step import FlatStep
from .gradient_buffer import GradientBuffer
from .leaf import own_grad, set_own_grad
from .shard_tensor import ShardTensor
from .stand_in import stand_in

if TYPE_CHECKING:
    from .runtime import Runtime

__all__ = ["InBackward"]

# Code that reads every gradient after backward, when there is none left, and would go on without a word.
_READERS = {
    "torch.nn.utils.clip_grad": "clipping gradients (torch.nn.utils)",
    "torch.amp.grad_scaler": "torch.amp.GradScaler",
}


class InBackward:
    """The optimizer that steps during one engine's backwards."""

    def __init__(self, optimizer: Any, runtime: Runtime) -> None:
        self.optimizer = optimizer
        self._runtime = weakref.ref(runtime)
        step = type(optimizer).step
        self._function = getattr(step, "__wrapped__", step) if getattr(step, "hooked", False) else step
        self._steps: dict[int, tuple[FlatBuffer, FlatStep]] = {}
        for unit in runtime.units:
            for flat in unit.flats:
                self._steps[id(flat.gradients)] = flat, FlatStep(optimizer, runtime, only=flat)
        self._stepped: set[int] = set()
        self._kinds: dict[type, type] = {}
        self._looked = False

    @property
    def _where(self) -> str:
        runtime = self._runtime()
        return f"rank {runtime.collectives.world_rank if runtime is not None else '?'}: "

    # -- around a backward --------------------------------------------------------------------------------------
    def begin(self, syncing: bool) -> None:
        """A backward begins.

        Raises:
            ShardError: under ``no_sync``, or with a GradScaler; nothing has been changed.
        """
        self._stepped.clear()
        if not syncing:
            raise ShardError(
                f"{self._where}no_sync() with engine.step_in_backward(): each backward is a step, so nothing can be accumulated. "
                "Leave one of them out."
            )
        if not self._looked:
            # A scaled loss can't be told from another one, so a scaler that has scaled one is looked for before the first
            # step; one that comes later is found when it reads the gradients.
            gc.collect()
            scaler = torch.amp.GradScaler
            if any(issubclass(type(o), scaler) and o._enabled and o._scale is not None for o in gc.get_objects()):
                raise self._refused("torch.amp.GradScaler (one in this process has scaled a loss)")
            self._looked = True
        with torch._C.DisableTorchFunctionSubclass():
            for group in self.optimizer.param_groups:
                for p in group["params"]:
                    if isinstance(p, ShardTensor) and own_grad(p) is not None:
                        raise ShardError(
                            f"{self._where}{p._spec.name} has a gradient from before engine.step_in_backward(), which this "
                            "backward would step with in part. Call optimizer.step() or zero_grad() first."
                        )

    def end(self) -> None:
        """The last unit has been stepped.

        Raises:
            ShardError: a parameter has got a gradient behind its step.
        """
        with torch._C.DisableTorchFunctionSubclass():
            for number in self._stepped:
                _, work = self._steps[number]
                for p in work.held():
                    if own_grad(p) is not None:
                        raise ShardError(
                            f"{self._where}a gradient of {p._spec.name} arrived behind its step: a term of the loss uses the "
                            "parameter itself (weight decay as p.pow(2).sum(), say). Use the optimizer's weight_decay, or leave "
                            "engine.step_in_backward() out."
                        )
        self._stepped.clear()

    # -- one unit -----------------------------------------------------------------------------------------------
    def step(self, gradients: GradientBuffer) -> None:
        """The parameters of `gradients` have their ``.grad``: update them and let go of it."""
        flat, work = self._steps[id(gradients)]
        if id(gradients) in self._stepped:
            raise ShardError(
                f"{self._where}parameters of {flat.layout.slots[0].name}'s unit got gradients twice in one backward, so they "
                "can't be stepped during it; leave engine.step_in_backward() out."
            )
        other, session = stand_in(self.optimizer, work, self._kinds)
        self._function(other)
        session.end()
        self.optimizer._opt_called = True  # as far as torch's schedulers are concerned
        self._stepped.add(id(gradients))
        with torch._C.DisableTorchFunctionSubclass():
            held = work.held()
            for p in held:
                set_own_grad(p, None)
        if held and not flat.sharded:
            # They are the parameters: who still has one saved must hear of it.
            torch.autograd.graph.increment_version(flat.leaves)

    # -- what can't be had together ---------------------------------------------------------------------------------
    def check_reader(self) -> None:
        """Somebody reads a ``.grad`` that is None."""
        frame: Any = sys._getframe(2)
        for _ in range(4):
            if frame is None:
                return
            name = frame.f_globals.get("__name__")
            if name in _READERS:
                raise self._refused(_READERS[name])
            frame = frame.f_back

    def _refused(self, what: str) -> ShardError:
        return ShardError(
            f"{self._where}{what} with engine.step_in_backward(): a unit's gradients are used and freed before the others' are "
            "known. Leave one of them out."
        )

    def refuse_clipping(self) -> None:
        raise self._refused("clipping gradients (engine.clip_grad_norm_, clip_grad_value_)")
