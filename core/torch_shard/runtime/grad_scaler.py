"""Detection of a backward from a loss that a ``torch.amp.GradScaler`` has scaled.

A scaled loss can't be told from another one. So ``GradScaler.scale`` is wrapped, once, for the life of the process, and the
wrapper puts a hook on the scaled loss, which backward calls first. The hook makes an object that only the graph task refers
to, as one of its callbacks, so that even a failed backward leaves nothing behind. Tested on torch 2.13.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch

from ..utils.pytree import tensors_in

# One for each running backward of a scaled loss. Autograd's graph task keeps it alive, so it goes when that backward ends.
_tasks: weakref.WeakSet[Callable[[], None]] = weakref.WeakSet()


def is_running() -> bool:
    """Return True if a backward from a scaled loss is running."""
    return bool(_tasks)


def follow() -> None:
    """Watch the losses that are scaled from now on.

    Classes that are derived from GradScaler later must call ``super().scale()``.
    """
    classes: list[type] = [torch.amp.GradScaler]
    for cls in classes:
        classes += cls.__subclasses__()
        scale: Any = cls.__dict__.get("scale")
        if scale is not None and not getattr(scale, "_torch_shard", False):
            cls.scale = _wrapped(scale)  # type: ignore[attr-defined]


def _wrapped(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def scale(self: Any, outputs: Any) -> Any:
        result = original(self, outputs)
        for scaled in tensors_in(result) if self.is_enabled() else ():
            if scaled.requires_grad:
                scaled.register_hook(_begins)
        return result

    scale._torch_shard = True  # type: ignore[attr-defined]
    return scale


def _begins(grad: torch.Tensor) -> None:
    def task() -> None:
        """Mark one backward; autograd's graph task alone refers to it."""

    _tasks.add(task)
    torch.autograd.Variable._execution_engine.queue_callback(task)
