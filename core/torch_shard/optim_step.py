"""The engine sees every optimizer step that changes its parameters, whoever calls it.

Gathered copies and graphs over them are out of date after a step, so they are dropped. The optimizer itself steps on
ShardTensors: what it does element by element happens on this rank's slices, anything else raises.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch.optim import optimizer as torch_optimizer

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

        self._handle = torch_optimizer.register_optimizer_step_post_hook(after)
        # A runtime that is dropped without close() must not leave a hook behind for the life of the process.
        weakref.finalize(runtime, self._handle.remove)

    def close(self) -> None:
        self._handle.remove()


def _steps(optimizer: Any, runtime: Runtime) -> bool:
    """Whether the optimizer holds a parameter of this runtime; groups are looked at until one answers."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            if isinstance(p, ShardTensor):
                unit = p._unit_ref() if p._unit_ref is not None else None
                if unit is not None and unit.runtime is runtime:
                    return True
    return False
