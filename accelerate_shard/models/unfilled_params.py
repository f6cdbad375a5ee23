"""Guards on a model of ``from_pretrained`` until it is sharded: methods that need values raise, and change nothing.

The guards are replaced methods of that one model. They are removed when the values arrive, and let a call pass if the model has
got values in another way. Adapters have values from the start, so they can be saved and loaded.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from torch_shard.errors import SetupError

from .. import _private
from .._private import compiled_inner
from . import _private_loading
from .method_overrides import shadow, unshadow

_FIRST = "call accelerator.prepare(model) or torch_shard.shard(model) before"


def guard(model: nn.Module) -> Callable[[], None]:
    """Put checks in front of methods of `model`, which is on meta; return a function that removes them. Not collective."""
    for name, check in _CHECKS.items():
        shadow(model, name, check)
    return functools.partial(_unguard, weakref.ref(model))


def unguard(model: nn.Module) -> None:
    """Remove the checks from `model`. Not collective."""
    for name, check in _CHECKS.items():
        unshadow(model, name, check)


def _unguard(reference: weakref.ref[nn.Module]) -> None:
    model = reference()
    if model is not None:
        unguard(model)


def refuse(model: nn.Module, what: str, remedy: str = _FIRST) -> None:
    """Raise where `what`, which saves `model`, would have to write parameters without values. Not collective.

    Raises:
        SetupError: names `remedy`, a clause.
    """
    plain = compiled_inner(model)
    if _waits(plain) and _private.saved_adapters(plain, {}) is None:
        raise _error(what, remedy)


def _waits(model: nn.Module) -> bool:
    return any(p.device.type == "meta" for p in model.parameters())


def _error(what: str, remedy: str) -> SetupError:
    return SetupError(
        f"{what}: the model has no values yet: each rank reads its part of them when the model is sharded. So {remedy}, on all "
        "ranks; or load the full model with the class's own from_pretrained."
    )


def _computes(module: nn.Module, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    if _waits(module):
        raise _error(f"{type(module).__name__}.{stock.__name__}", _FIRST)
    unguard(module)
    return stock(*args, **kwargs)


def _saves(module: nn.Module, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    given = kwargs.get("state_dict")
    if not given or any(isinstance(value, torch.Tensor) and value.is_meta for value in given.values()):
        refuse(module, f"{type(module).__name__}.save_pretrained")
    return stock(*args, **kwargs)


def _loads_adapter(module: nn.Module, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Load an adapter to the CPU, where its parameters are, and not to meta, where the model is."""
    if not _waits(module):
        return stock(*args, **kwargs)
    with _private_loading.adapters_on_cpu(module):
        return stock(*args, **kwargs)


_CHECKS: dict[str, Callable[..., Any]] = {
    "forward": _computes,
    "generate": _computes,
    "save_pretrained": _saves,
    "load_adapter": _loads_adapter,
}
