"""Files of full parameters that one rank writes, whatever the others do: those of pickle, and of safetensors' functions."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch

from ..shard_tensor.tensor import ShardTensor

__all__ = ["read_alone", "write_full_safetensors"]

_MARK = "_torch_shard_stock"  # of our functions: the one that was there


def read_alone(tensor: ShardTensor, seen: dict[Any, torch.Tensor] | None = None) -> torch.Tensor:
    """Return the full values of a sharded tensor, which this rank reads whatever the others do: plain. Not collective.

    Args:
        tensor: the tensor.
        seen: what was read for the same file, as long as its tensors live; it is added to. A parameter that has several names, as
            tied weights have, is read once then, and its names share memory, as they do in plain torch.

    Raises:
        ShardPicklingError: it is neither a parameter nor state from an optimizer's ``state_dict()``, or reads alone are switched
            off.
    """
    # Each state dict has other objects for one parameter.
    is_param = tensor._unit_ref is not None
    key = (id(tensor._spec), tensor._local.data_ptr(), tensor._local.dtype) if is_param else id(tensor)
    if seen is not None and key in seen:
        return seen[key]
    found = tensor._full_for_file()
    if found is None:
        tensor.__reduce_ex__(2)  # raises
        raise AssertionError
    if seen is not None:
        seen[key] = found
    return found


def write_full_safetensors() -> None:
    """Have ``safetensors.torch.save`` and ``save_file`` write sharded parameters in full, as ``torch.save`` does. Not collective.

    The rank that calls them reads the values from the others. Does nothing where safetensors is not installed, and once is
    enough. A module that has imported the functions by name before keeps the stock ones, which raise for sharded parameters.
    """
    if importlib.util.find_spec("safetensors") is None:
        return
    import safetensors.torch

    for name in ("save", "save_file"):
        stock = getattr(safetensors.torch, name)
        if not hasattr(stock, _MARK):
            setattr(safetensors.torch, name, _with_full_tensors(stock))


def _with_full_tensors(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def save(tensors: dict[str, torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(value, ShardTensor) for value in tensors.values()):
            seen: dict[Any, torch.Tensor] = {}
            tensors = {k: read_alone(v, seen) if isinstance(v, ShardTensor) else v for k, v in tensors.items()}
        return stock(tensors, *args, **kwargs)

    setattr(save, _MARK, stock)
    return save
