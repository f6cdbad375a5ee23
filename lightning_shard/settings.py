"""A strategy's ShardConfig: made from keyword arguments, and compared."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from torch_shard import Precision, ShardConfig
from torch_shard.errors import ConfigError

__all__ = ["same_config", "with_overrides"]


def with_overrides(config: ShardConfig | None, overrides: Mapping[str, Any], strategy: str) -> ShardConfig:
    """`config`, or the default, with some fields changed; None leaves a field as it is.

    Raises:
        ConfigError: there is no such field, or its value is bad.
    """
    known = [field.name for field in dataclasses.fields(ShardConfig)]
    unknown = [name for name in overrides if name not in known]
    if unknown:
        raise ConfigError(f"{unknown[0]}: no such setting; {strategy} and ShardConfig have none of that name.")
    chosen = {name: value for name, value in overrides.items() if value is not None}
    return dataclasses.replace(config or ShardConfig(), **chosen)


def same_config(a: ShardConfig, b: ShardConfig) -> bool:
    # Not a == b: `ignore` may hold parameters, and comparing those compares values.
    return a is b or all(
        _same(getattr(a, field.name), getattr(b, field.name)) for field in dataclasses.fields(ShardConfig)
    )


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return a is b or (isinstance(a, (str, int, float, Precision)) and type(a) is type(b) and a == b)
