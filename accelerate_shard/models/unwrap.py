"""The module that is sharded, and its engine, of what ``prepare`` has returned."""

from __future__ import annotations

from collections.abc import Iterable

from torch import nn

import torch_shard
from torch_shard import Engine

from .._private import compiled_inner as inner

__all__ = ["engine_of", "engines_of", "inner"]


def engine_of(model: nn.Module) -> Engine | None:
    """Return the engine of a prepared model, compiled or not; None if it is not sharded. Not collective.

    None for its parts, too; :func:`torch_shard.frontend.engine_holding` finds the engine whose shards any module holds.
    """
    return torch_shard.engine_of(inner(model))


def engines_of(models: Iterable[nn.Module]) -> list[Engine]:
    """Return the engines of those of `models` that are sharded, in their order. Not collective."""
    return [engine for engine in map(engine_of, models) if engine is not None]
