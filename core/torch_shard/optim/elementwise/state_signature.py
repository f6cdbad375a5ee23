"""Which parameters may be stepped together, by their optimizer state."""

from __future__ import annotations

from typing import Any

import torch

from ...errors import NeedsGatherError
from ...shard_tensor.spec import same_cut
from ...shard_tensor.tensor import ShardTensor

__all__ = ["signature"]


def signature(param: ShardTensor, entries: Any) -> Any:
    """What parameters of one run must agree in; raises where a flat step can't take the state."""
    if not entries:
        return None
    found: list[tuple[Any, ...]] = []
    for key, value in entries.items():
        if isinstance(value, ShardTensor):
            if not same_cut(value._spec, param._spec):
                raise _unusable(param, key, "is a sharded tensor that is cut differently")
            found.append((key, "elements", value.dtype))
        elif isinstance(value, torch.Tensor):
            if value.dim():
                raise _unusable(
                    param, key, f"has shape {tuple(value.shape)} where the parameter has {tuple(param.shape)}"
                )
            found.append((key, value.dtype, value.device, value.item()))
        elif value is None or isinstance(value, (bool, int, float, complex, str)):
            found.append((key, type(value), value))
        else:
            raise _unusable(param, key, f"is a {type(value).__name__}")
    return tuple(found)


def _unusable(param: ShardTensor, key: str, what: str) -> NeedsGatherError:
    return NeedsGatherError(
        f"rank {param._spec.world_rank}: optimizer state {key!r} of {param._spec.name} {what}, which a step on slices can't use; "
        "nothing was changed. Drop it (`optimizer.state.pop(parameter)`), load state that fits, or change the parameter inside "
        "`with engine.gathered(parameter, write=True)`."
    )
