"""PEFT's methods that add adapters to a sharded model, or merge them into its weights."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable
from typing import Any

from torch import nn

from torch_shard.errors import ConfigError
from torch_shard.frontend import engine_holding


def add_adapter(module: nn.Module, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run ``add_adapter``, or a tuner's ``add_weighted_adapter`` or ``inject_adapter``. Not collective.

    Refused on a sharded model, since the new parameters would belong to no unit.

    Raises:
        ConfigError: nothing has changed.
    """
    if engine_holding(module) is not None:
        raise _too_late(module, stock.__name__, _adapter_name(stock, args, kwargs))
    return stock(*args, **kwargs)


def load_adapter(module: nn.Module, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Load values into an adapter that the model has; refused for a new one. Call on all ranks.

    Raises:
        ConfigError: the model has no adapter of that name; nothing has changed.
    """
    name = _adapter_name(stock, args, kwargs)
    if engine_holding(module) is not None and name not in getattr(module, "peft_config", {}):
        raise _too_late(module, "load_adapter", name)
    return stock(*args, **kwargs)


def on_full_weights(module: nn.Module, stock: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Run ``merge_and_unload`` and its like on full weights, and shard what they become. Collective.

    Raises:
        MissingRankError: some rank does not call it.
    """
    engine = engine_holding(module)
    with contextlib.nullcontext() if engine is None else engine.gathered(write=True):
        return stock(*args, **kwargs)


def _adapter_name(stock: Callable[..., Any], args: Any, kwargs: Any) -> str:
    found = inspect.signature(stock).bind_partial(*args, **kwargs).arguments.get("adapter_name")
    return found if isinstance(found, str) else "default"


def _too_late(module: nn.Module, what: str, name: str) -> ConfigError:
    return ConfigError(
        f"{type(module).__name__}.{what}({name!r}): the model is sharded, and an adapter added now would not be. Add "
        "every adapter before accelerator.prepare(model), and choose between them with set_adapter (load_adapter loads values "
        "into one that is there); or call engine.close(), add it, and prepare the model again."
    )
