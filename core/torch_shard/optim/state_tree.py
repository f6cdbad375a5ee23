"""Values of optimizer state that hold tensors: nested dicts, lists, tuples, and tensors that are made of others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from ..layout.dtensor_placement import local_of
from ..shard_tensor.tensor import ShardTensor
from ..shard_tensor.wrapper_subclasses import Taken, is_wrapper, take


class Sent:
    """The place of a tensor in a description that is sent ahead of it."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.shape, self.dtype = tuple(tensor.shape), tensor.dtype
        self.stride = tensor.stride()
        self.nbytes = tensor.nbytes


def tensors_of(value: Any) -> list[torch.Tensor]:
    """Return the plain tensors in nested dicts, lists and tuples, and in tensors that hold others, in order.

    An optimizer may keep such values under one key.
    """
    if is_wrapper(value):
        value = take(value)
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, Taken):
        value = value.parts
    children = value.values() if isinstance(value, Mapping) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for child in children for tensor in tensors_of(child)]


def map_tensors(value: Any, change: Any) -> Any:
    """Return `value` with new containers, in which `change` was called with each plain tensor or :class:`Sent`."""
    if is_wrapper(value):
        value = take(value)
    if isinstance(value, Taken):
        return value.map_parts(lambda part: map_tensors(part, change))
    if isinstance(value, (torch.Tensor, Sent)):
        return change(value)
    if isinstance(value, Mapping):
        return {key: map_tensors(child, change) for key, child in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(map_tensors(child, change) for child in value))
    if isinstance(value, (list, tuple)):
        return type(value)(map_tensors(child, change) for child in value)
    return value


def local(value: Any) -> Any:
    """Return `value` with this rank's part of each DTensor, which shares its memory."""
    return map_tensors(value, local_of)


def copied(value: Any, device: str | None = None) -> Any:
    """Return `value` with a copy of each plain tensor, on `device` or its own; ShardTensors stay."""
    return map_tensors(
        value, lambda t: t if isinstance(t, ShardTensor) else t.detach().to(device or t.device, copy=True)
    )
