"""What an optimizer works on during its step.

torch chooses its multi-tensor and fused kernels for plain tensors only, so for the duration of an optimizer's arithmetic
the sharded parameters, their gradients and their state stand aside for plain tensors over the same memory: this rank's
slices. Afterwards `optimizer.state[p]` holds ShardTensors again. Only optimizers that work element by element may see
slices; they are matched by exact type, since a subclass may do anything (SAM is an SGD by `isinstance`). Every other
optimizer steps on the ShardTensors themselves: what is local arithmetic works, anything else raises.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import optimizer as _torch_optimizer

from .shard_tensor import ShardTensor

if TYPE_CHECKING:
    from .runtime import Runtime

ELEMENTWISE: frozenset[type] = frozenset(
    {
        torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.NAdam, torch.optim.RAdam, torch.optim.Adamax,
        torch.optim.Adagrad, torch.optim.Adadelta, torch.optim.RMSprop, torch.optim.Rprop, torch.optim.ASGD,
    }
)  # fmt: skip


class StepWatch:
    """Sees every optimizer step of the process that touches this runtime's parameters, through torch's global hooks."""

    def __init__(self, runtime: Runtime) -> None:
        self.runtime = weakref.ref(runtime)
        own = weakref.WeakMethod(self._after)
        self._own = own

        def after(optimizer: Any, args: Any, kwargs: Any) -> None:
            method = own()
            if method is not None:
                method(optimizer)

        self._handle = _torch_optimizer.register_optimizer_step_post_hook(after)
        self._finalizer = weakref.finalize(self, self._handle.remove)

    def _after(self, optimizer: Any) -> None:
        runtime = self.runtime()
        if runtime is None:
            return
        for group in optimizer.param_groups:
            for p in group["params"]:
                if isinstance(p, ShardTensor) and p._unit_ref is not None:
                    unit = p._unit_ref()
                    if unit is not None and unit.runtime is runtime:
                        runtime.parameters_changed()
                        return

    def close(self) -> None:
        self._handle.remove()
