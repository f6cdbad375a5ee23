"""Precision plugins under sharding: which are accepted, and what they mean for the engine."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from torch_shard import ShardConfig
from torch_shard.frontend import for_autocast

from .._private import Private


def check(plugin: Any, private: Private, strategy: str = "ShardStrategy") -> None:
    """Raise for a precision plugin that can't be right.

    Raises:
        MisconfigurationException: the plugin belongs to another strategy.
    """
    if isinstance(plugin, private.refused_precision):
        raise private.MisconfigurationException(
            f"{type(plugin).__name__} does not work with {strategy}. Supported are '32-true', '64-true', "
            "'bf16-mixed' and '16-mixed' (autocast), 'bf16-true' and '16-true'."
        )


def config_for(plugin: Any, config: ShardConfig, module: nn.Module, private: Private) -> ShardConfig:
    """Return `config` with what a plugin of mixed precision means (see :func:`torch_shard.frontend.for_autocast`)."""
    if not isinstance(plugin, private.MixedPrecision):
        return config
    dtype = torch.float16 if plugin.precision == "16-mixed" else torch.bfloat16
    return for_autocast(config, module, dtype, f"precision={plugin.precision!r}")
