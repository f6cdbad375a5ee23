"""From what ``prepare`` has returned to the module that is sharded."""

from __future__ import annotations

from torch import nn

import torch_shard
from torch_shard import Engine

from ._private import compiled_inner

__all__ = ["engine_of", "inner"]


def inner(model: nn.Module) -> nn.Module:
    """`model` without what ``torch.compile`` put around it."""
    return compiled_inner(model)


def engine_of(model: nn.Module) -> Engine | None:
    """The engine of a prepared model, compiled or not; None where it is not sharded. Not collective.

    None for its parts, too. Whether a module holds slices, be it the prepared one or a part of it, says
    :func:`accelerate_shard.shadowed.runtime_of`.
    """
    return torch_shard.engine_of(inner(model))
