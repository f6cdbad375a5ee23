"""Objects given to ``register_for_checkpointing``, whose state may hold slices: averages of parameters, for one.

In the file are whole tensors, as without sharding; loading cuts them as the object's own are cut.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from torch_shard import ShardTensor
from torch_shard.frontend import map_tensors, shard_like, tensors_of
from torch_shard.log import logger

from .ranks import Ranks

__all__ = ["as_cut", "file_name", "write"]


def file_name(number: int) -> str:
    """The file of the object of this number."""
    return f"custom_checkpoint_{number}.pkl"


def write(ranks: Ranks, objects: list[Any], folder: Path) -> None:
    """Write the objects' states, on rank 0. Collective: ``state_dict`` is called on all ranks.

    Raises:
        ShardError: on all ranks; an object can't be saved, or holds other slices on some ranks.
    """
    for number, custom in enumerate(objects):
        state = ranks.each(custom.state_dict, key=lambda found: [t.shape for t in _shards(found)])
        if _shards(state):
            state = map_tensors(state, lambda t: _whole(t, ranks.is_first))
        ranks.on_first(lambda state=state, number=number: _write(state, folder / file_name(number)))  # type: ignore[misc]


def _shards(state: Any) -> list[ShardTensor]:
    return [tensor for tensor in tensors_of(state) if isinstance(tensor, ShardTensor)]


def _whole(tensor: torch.Tensor, wanted: bool) -> torch.Tensor:
    if not isinstance(tensor, ShardTensor):
        return tensor
    whole: torch.Tensor = tensor.full_tensor().detach()
    return whole.cpu() if wanted else whole[:0].clone()


def _write(state: Any, path: Path) -> None:
    torch.save(state, path)
    names = torch.serialization.get_unsafe_globals_in_checkpoint(path)
    if names:
        logger.warning(
            "%s holds objects of %s, which the safe loader does not accept: load_state will need ShardPlugin(weights_only=False) "
            "or torch.serialization.add_safe_globals([...])",
            path.name,
            ", ".join(names),
        )


def as_cut(custom: Any, state: Any) -> Any:
    """`state`, which was saved, with slices where the object has slices now. Not collective."""
    if not any(tensor.dim() for tensor in tensors_of(state)):
        return state
    own = custom.state_dict()
    return _cut(state, own) if _shards(own) else state


def _cut(value: Any, like: Any) -> Any:
    if isinstance(value, torch.Tensor):
        if not isinstance(like, ShardTensor) or isinstance(value, ShardTensor) or value.shape != like.shape:
            return value
        return shard_like(value, like)
    if isinstance(value, Mapping) and isinstance(like, Mapping):
        return {key: _cut(child, like.get(key)) for key, child in value.items()}
    if isinstance(value, (list, tuple)) and isinstance(like, (list, tuple)) and len(value) == len(like):
        return type(value)([_cut(child, other) for child, other in zip(value, like, strict=True)])
    return value
