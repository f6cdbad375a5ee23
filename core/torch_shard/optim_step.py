"""The engine sees every optimizer step that changes its parameters, whoever calls it.

Gathered copies and graphs over them are out of date after a step, so they are dropped. The optimizer itself steps on
ShardTensors: what it does element by element happens on this rank's slices, anything else raises.
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
            # A closure may reduce them yet.
            if alive is not None and alive.holds_gradients() and not _closure(args, kwargs):
                _refuse_unreduced(optimizer, alive)

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


def _steps(optimizer: Any, runtime: Runtime) -> bool:
    """Whether the optimizer holds a parameter of this runtime; groups are looked at until one answers."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if isinstance(p, ShardTensor):
                unit = p._unit_ref() if p._unit_ref is not None else None
                if unit is not None and unit.runtime is runtime:
                    return True
    return False
