"""The engine sees every optimizer step that changes its parameters, whoever calls it.

Gathered copies and graphs over them are out of date after a step, so they are dropped. The optimizer itself steps on
ShardTensors: what it does element by element happens on this rank's slices, anything else raises. State that it made
before the model was sharded, or that it was given from a plain checkpoint, is sharded when it steps.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import optimizer as torch_optimizer

from .errors import ShardError
from .leaf import own_grad
from .shard_tensor import ShardTensor

if TYPE_CHECKING:
    from .runtime import Runtime


class StepWatch:
    """Follows torch's global optimizer step hook for one runtime; closed with its engine."""

    def __init__(self, runtime: Runtime) -> None:
        reference = weakref.ref(runtime)

        def after(optimizer: Any, args: Any, kwargs: Any) -> None:
            alive = reference()
            if alive is not None and _steps(optimizer, alive):
                alive.parameters_changed()
                if alive.holds_gradients() and _closure(args, kwargs):
                    _refuse_unreduced(optimizer, alive)

        def before(optimizer: Any, args: Any, kwargs: Any) -> None:
            alive = reference()
            if alive is None:
                return
            # A closure may reduce them yet.
            if alive.holds_gradients() and not _closure(args, kwargs):
                _refuse_unreduced(optimizer, alive)
            _shard_state(optimizer, alive)

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


def _closure(args: Any, kwargs: Any) -> Any:
    return kwargs.get("closure", args[1] if len(args) > 1 else None)


def _refuse_unreduced(optimizer: Any, runtime: Runtime) -> None:
    """Each rank would step its slice with a gradient of its own."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if not isinstance(p, ShardTensor):
                continue
            with torch._C.DisableTorchFunctionSubclass():
                grad: Any = own_grad(p)
            unreduced = getattr(grad, "_unreduced", False)
            unit = p._unit_ref() if unreduced and p._unit_ref is not None else None
            if unit is not None and unit.runtime is runtime and grad._local.count_nonzero():
                raise ShardError(
                    f"rank {p._spec.rank}: optimizer.step() with a gradient of {p._spec.name} that is not reduced, because every "
                    "backward since zero_grad() ran under no_sync(). Run the last backward, with its forward, outside."
                )


def _shard_state(optimizer: Any, runtime: Runtime) -> None:
    """Replace whole plain tensors in the state of this runtime's parameters by this rank's slices of them. Looked for in
    every step: state comes with `load_state_dict` at any time, and looking costs little beside a step. Not collective."""
    state = getattr(optimizer, "state", None)
    if not state:
        return
    scalars: list[tuple[ShardTensor, Any, str]] = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            own = state.get(p) if isinstance(p, ShardTensor) else None
            if not isinstance(own, dict):
                continue
            for key, value in own.items():
                # Counters are whole on every rank.
                if type(value) is not torch.Tensor or key == "step" or value.shape != p._spec.shape:
                    continue
                unit = p._unit_ref() if p._unit_ref is not None else None
                if unit is None or unit.runtime is not runtime or unit.is_summoned:
                    break
                if value.dim():
                    own[key] = _slice(value, p)  # the key stays, so the dict may be gone through
                else:
                    scalars.append((p, own, key))
    if scalars:
        # Next to a 0-dim parameter its own moments look like counters. Where others have slices under that name, so has it.
        dicts = [own for own in state.values() if isinstance(own, dict)]
        sliced = {k for own in dicts for k, v in own.items() if type(v) is ShardTensor and v._spec.shape}
        for p, own, key in scalars:
            if key in sliced:
                own[key] = _slice(own[key], p)


def _slice(value: torch.Tensor, param: ShardTensor) -> ShardTensor:
    return ShardTensor.from_full(value.to(param._local.device), param._spec)


def _steps(optimizer: Any, runtime: Runtime) -> bool:
    """Whether the optimizer holds a parameter of this runtime; groups are looked at until one answers."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if isinstance(p, ShardTensor):
                unit = p._unit_ref() if p._unit_ref is not None else None
                if unit is not None and unit.runtime is runtime:
                    return True
    return False
