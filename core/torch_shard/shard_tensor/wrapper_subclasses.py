"""Wrapper subclasses, tensors that hold other tensors (quantized optimizer state, say), taken apart and put together.

This uses torch's protocol for such classes, ``__tensor_flatten__`` and ``__tensor_unflatten__``. ShardTensors and DTensors
are excluded, because they hold only a part of the tensor.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from ..layout.dtensor_placement import is_dtensor
from .tensor import ShardTensor


def is_wrapper(value: Any) -> bool:
    """Return True if `value` is a full tensor that holds others."""
    return (
        isinstance(value, torch.Tensor)
        and type(value) is not torch.Tensor
        and not isinstance(value, ShardTensor)
        and not is_dtensor(value)
        and is_traceable_wrapper_subclass(value)
    )


@dataclass
class Taken:
    """The contents of a wrapper subclass; each of `parts` is a tensor, another Taken, or an object that stands for a tensor."""

    cls: Any
    context: Any
    parts: dict[str, Any]
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def map_parts(self, change: Callable[[Any], Any]) -> Any:
        """Return a copy with ``change(part)`` in place of each part; it is a tensor again if all of these are tensors."""
        parts = {name: change(part) for name, part in self.parts.items()}
        if all(isinstance(part, torch.Tensor) for part in parts.values()):
            return self.cls.__tensor_unflatten__(parts, self.context, torch.Size(self.shape), self.stride)
        return Taken(self.cls, self.context, parts, self.shape, self.stride)


def take(value: Any) -> Taken:
    """Return the contents of a wrapper subclass, which share its memory."""
    names, context = value.__tensor_flatten__()
    parts = {name: getattr(value, name) for name in names}
    return Taken(type(value), context, parts, tuple(value.shape), tuple(value.stride()))
