"""A strategy's ShardConfig: made from keyword arguments, and compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, TypeAlias

from torch import nn

from torch_shard import Precision, ShardConfig
from torch_shard.activation_checkpointing import Layers, checked_layers
from torch_shard.errors import ConfigError

__all__ = ["LayersOrOne", "chosen_layers", "same_config", "with_overrides"]

LayersOrOne: TypeAlias = Layers | type[nn.Module] | str | None
"""What strategies take as ``activation_checkpointing``."""


def chosen_layers(chosen: LayersOrOne) -> Layers:
    """``activation_checkpointing`` as the engine takes it: a single class or name stands for a sequence of one.

    Raises:
        ConfigError: it is something else.
    """
    return checked_layers((chosen,) if isinstance(chosen, (str, type)) else False if chosen is None else chosen)


def with_overrides(config: ShardConfig | None, overrides: Mapping[str, Any], strategy: str) -> ShardConfig:
    """`config`, or the default, with some fields changed.

    Raises:
        ConfigError: there is no such field, or its value is bad.
    """
    known = [field.name for field in dataclasses.fields(ShardConfig)]
    unknown = [name for name in overrides if name not in known]
    if unknown:
        raise ConfigError(f"{unknown[0]}: no such setting; {strategy} and ShardConfig have none of that name.")
    return dataclasses.replace(config or ShardConfig(), **overrides)


def same_config(a: ShardConfig, b: ShardConfig) -> bool:
    # Not a == b: `ignore` may hold parameters, and comparing those compares values.
    return a is b or all(
        _same(getattr(a, field.name), getattr(b, field.name)) for field in dataclasses.fields(ShardConfig)
    )


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return a is b or (isinstance(a, (str, int, float, Precision)) and type(a) is type(b) and a == b)
