"""A sharded model's state dict as this rank holds it: in ShardTensors, or in plain shards."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..comm.consensus import agree
from ..errors import StateDictError
from ..runtime.runtime import Runtime
from ..shard_tensor.tensor import ShardTensor
from . import model_state

__all__ = ["convert", "from_local", "sharded"]


def sharded(model: nn.Module, runtime: Runtime, offload_to_cpu: bool, local: bool = False) -> dict[str, Any]:
    """Return ``model.state_dict()`` with ShardTensors, converted by :func:`convert`. Not collective."""
    found = model_state.own_state_dict(model, runtime)
    convert(found, offload_to_cpu, local)
    return found


def convert(found: dict[str, Any], offload_to_cpu: bool, local: bool) -> None:
    """Put a state dict's tensors on the CPU, with `local` as plain 1-D shards, which only the same layout can load."""
    for key, value in found.items():
        own = value._local if isinstance(value, ShardTensor) else value
        if offload_to_cpu and isinstance(own, torch.Tensor) and own.device.type != "cpu":
            own = own.detach().cpu()
            value = ShardTensor(own, value._spec) if isinstance(value, ShardTensor) else own
        found[key] = own.detach() if local and isinstance(value, ShardTensor) else value


def from_local(model: nn.Module, runtime: Runtime, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a state dict with plain shards as one with ShardTensors. Collective.

    Raises:
        StateDictError: raised on all ranks if a shard has another length or dtype than this rank holds.
    """
    what = "engine.load_state_dict"
    problems = []
    result = model_state.with_metadata(given, given)
    for key, held in model_state.own_state_dict(model, runtime).items():
        value = given.get(key)
        if not isinstance(held, ShardTensor) or not isinstance(value, torch.Tensor):
            continue
        own = held._local
        if isinstance(value, ShardTensor) or value.shape != own.shape or value.dtype != own.dtype:
            kind = "sharded" if isinstance(value, ShardTensor) else f"{value.dtype} of shape {tuple(value.shape)}"
            problems.append(f"{key}: this rank's shard is {own.dtype} of shape {tuple(own.shape)}, the entry {kind}")
        else:
            result[key] = ShardTensor(value.detach(), held._spec)
    error = None
    if problems:
        error = StateDictError(
            f"rank {runtime.collectives.world_rank}: {what}: local shards fit the same number of ranks, strategy and units "
            "only, and nothing was loaded.\n  " + "\n  ".join(problems)
        )
    agree(runtime, what, None, error)
    return result
