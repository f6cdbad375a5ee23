"""Files of full parameters that one rank writes, whatever the others do, and safetensors' functions for sharded models."""

from __future__ import annotations

import functools
import importlib.util
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from ..shard_tensor.tensor import ShardTensor
from ..state.model_state import values_key

__all__ = ["read_alone", "write_full_safetensors"]

_MARK = "_torch_shard_stock"  # the attribute of our functions that holds the replaced one


def read_alone(tensor: ShardTensor, seen: dict[Any, torch.Tensor]) -> torch.Tensor:
    """Return the full values of a sharded tensor as a plain one, whatever the other ranks do. Not collective.

    Args:
        tensor: the tensor.
        seen: the values that were read for the same file, to which these are added; `tensor` must live as long. A parameter with
            several names (tied weights) is read once, and its names share memory, as they do in plain torch.

    Raises:
        ShardPicklingError: the tensor is neither a parameter nor state from an optimizer's ``state_dict()``, or reads alone are
            switched off.
    """
    key = values_key(tensor)  # each state dict has other objects for one parameter
    if key not in seen:
        found = tensor._full_for_file()
        if found is None:
            tensor.__reduce_ex__(2)  # raises
            raise AssertionError
        seen[key] = found
    return seen[key]


def write_full_safetensors() -> None:
    """Make functions of ``safetensors.torch`` take sharded parameters. Not collective.

    ``save``, ``save_file`` and ``save_model`` write them in full, as ``torch.save`` does: the rank that calls them reads the
    values from the others. ``load_model`` loads into them, on all ranks. One call is enough; without safetensors it does nothing.
    A module that has imported the functions by name before keeps the stock ones, which raise for sharded parameters.
    """
    if importlib.util.find_spec("safetensors") is None:
        return
    import safetensors.torch

    for name in ("save", "save_file"):
        stock = getattr(safetensors.torch, name)
        if not hasattr(stock, _MARK):
            setattr(safetensors.torch, name, _with_full_tensors(stock))
    of_models: dict[str, Callable[..., torch.Tensor]] = {"save_model": read_alone, "load_model": _stand_in}
    for name, plain in of_models.items():
        stock = getattr(safetensors.torch, name)
        if not hasattr(stock, _MARK):
            setattr(safetensors.torch, name, _with_plain_state(stock, plain))


def _with_full_tensors(stock: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(stock)
    def save(tensors: dict[str, torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        if any(isinstance(value, ShardTensor) for value in tensors.values()):
            seen: dict[Any, torch.Tensor] = {}
            tensors = {k: read_alone(v, seen) if isinstance(v, ShardTensor) else v for k, v in tensors.items()}
        return stock(tensors, *args, **kwargs)

    setattr(save, _MARK, stock)
    return save


def _with_plain_state(stock: Callable[..., Any], plain: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """Return `stock`, a function of a model, to which the state dict shows ``plain(tensor, seen)`` for sharded tensors."""

    @functools.wraps(stock)
    def of_model(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if not any(isinstance(p, ShardTensor) for p in model.parameters()):
            return stock(model, *args, **kwargs)
        seen: dict[Any, Any] = {}
        found = {k: plain(v, seen) if isinstance(v, ShardTensor) else v for k, v in model.state_dict().items()}
        before = model.__dict__.get("state_dict")
        model.__dict__["state_dict"] = lambda: found
        try:
            return stock(model, *args, **kwargs)
        finally:
            del model.__dict__["state_dict"]
            if before is not None:
                model.__dict__["state_dict"] = before

    setattr(of_model, _MARK, stock)
    return of_model


def _stand_in(tensor: ShardTensor, seen: dict[Any, Any]) -> torch.Tensor:
    """Return a small tensor, one for each parameter, since ``load_model`` looks only at which names share memory."""
    found: torch.Tensor = seen.setdefault(values_key(tensor), torch.zeros(min(1, tensor.numel()), device="cpu"))
    return found
