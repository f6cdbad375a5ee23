"""ShardTensors in a checkpoint beyond model and optimizer states: those of averages of the weights, or of a user's own callback.

In the full form they become whole on rank 0. In the sharded form each is an entry of its own
(:mod:`torch_shard.checkpoint.sharded.extra_shards`).
"""

from __future__ import annotations

from typing import Any

import torch

from torch_shard import Engine, ShardTensor
from torch_shard.frontend import agree, param_name
from torch_shard.frontend.checkpoint import mapped

from .full import on_meta

__all__ = ["gathered", "names", "whole"]


def whole(engine: Engine, tree: Any) -> Any:
    """The tree with whole tensors on the CPU of rank 0, and on the others entries without memory. Collective.

    Raises:
        DivergenceError: on all ranks: they have not put the same things into the checkpoint.
    """
    agree(engine, "saving a checkpoint", names(tree))
    first = engine.rank == 0

    def gather(slices: ShardTensor) -> torch.Tensor:
        found = gathered(slices, engine.device)
        return found.cpu() if first else on_meta(slices)

    return mapped(tree, gather)


def gathered(slices: ShardTensor, device: torch.device) -> torch.Tensor:
    """The whole, on a device from which the ranks can send: slices of an average may be elsewhere. Collective."""
    there: Any = slices.detach().to(device)
    return there.full_tensor()  # type: ignore[no-any-return]


def names(tree: Any) -> list[str]:
    """What is sharded in a tree, in order, each by the name of the parameter that it is cut as. Not collective."""
    found: list[str] = []

    def note(slices: ShardTensor) -> ShardTensor:
        found.append(param_name(slices))
        return slices

    mapped(tree, note)
    return found
