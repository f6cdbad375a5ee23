"""ShardTensors in a checkpoint outside model and optimizer states, such as averages of the weights.

A full checkpoint holds them as full tensors. In a sharded one each is an entry of its own
(:func:`torch_shard.frontend.checkpoint.split`).
"""

from __future__ import annotations

from typing import Any

import torch

from torch_shard import Engine, ShardTensor
from torch_shard.frontend import agree, param_name
from torch_shard.frontend.checkpoint import map_shards

from .full import on_meta


def gather_shards(engine: Engine, tree: Any) -> Any:
    """Replace ShardTensors in a tree: by full tensors on rank 0's CPU, by meta tensors on other ranks. Collective.

    Raises:
        DivergenceError: on all ranks, if they have not put the same ShardTensors into the checkpoint.
    """
    agree(engine, "saving a checkpoint", shard_names(tree))
    first = engine.rank == 0

    def gather(shard: ShardTensor) -> torch.Tensor:
        found = full_tensor(shard, engine.device)
        return found.cpu() if first else on_meta(shard)

    return map_shards(tree, gather)


def full_tensor(shard: ShardTensor, device: torch.device) -> torch.Tensor:
    """Return the full tensor on `device`, over which shards are sent; they may lie on another one. Collective."""
    there: Any = shard.detach().to(device)
    return there.full_tensor()  # type: ignore[no-any-return]


def shard_names(tree: Any) -> list[str]:
    """Return, for each ShardTensor in a tree, the name of the parameter that it is sharded like. Not collective."""
    found: list[str] = []

    def note(shard: ShardTensor) -> ShardTensor:
        found.append(param_name(shard))
        return shard

    map_shards(tree, note)
    return found
