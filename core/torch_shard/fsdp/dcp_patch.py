"""A patch of ``torch.distributed.checkpoint.state_dict`` for models of :mod:`torch_shard.fsdp`.

Its functions ask for ShardTensors, whatever ``state_dict_type`` is set, as with torch's FullyShardedDataParallel. With
``full_state_dict=True`` they would return these as they are, so that one rank's shards would be saved as full tensors. The patch
wraps torch's function that makes full tensors.
"""

from __future__ import annotations

import functools
import zlib
from typing import Any

import torch

from ..errors import ConfigError
from ..optim.matrix.state import all_gather_bytes
from ..optim.state_tree import map_tensors
from ..runtime.registry import runtime_of
from ..runtime.runtime import Runtime
from ..shard_tensor.tensor import ShardTensor
from ..state_dict_type import as_shards
from ..unit.unit import unit_of

_WHAT = "get_state_dict(full_state_dict=True)"


@functools.cache
def install() -> None:
    """Patch the private functions (torch 2.13), once."""
    from torch.distributed.checkpoint import state_dict as dcp

    original = dcp._maybe_full_or_cpu_state_dict

    @functools.wraps(original)
    def with_shards(state_dict: dict[str, Any], info: Any) -> dict[str, Any]:
        runtime = _runtime(info) if info.full_state_dict else None
        return original(state_dict if runtime is None else _full(runtime, state_dict, info.cpu_offload), info)

    dcp._maybe_full_or_cpu_state_dict = with_shards
    dcp._get_model_state_dict = as_shards()(dcp._get_model_state_dict)
    dcp._load_model_state_dict = as_shards()(dcp._load_model_state_dict)


def _runtime(info: Any) -> Runtime | None:
    """Return the runtime of the sharded model in a call of torch's; None if the model is not sharded."""
    for param in info.fqn_param_mapping.values():
        unit = unit_of(param)
        if unit is not None:
            return runtime_of(unit)
    return None


def _full(runtime: Runtime, state_dict: dict[str, Any], cpu_offload: bool) -> dict[str, Any]:
    """Return `state_dict` with full tensors in new memory, on rank 0 only if they go to the CPU. Collective."""
    keys = zlib.crc32(repr(_keys(state_dict)).encode()).to_bytes(4, "little")
    if len({tuple(each) for each in all_gather_bytes(runtime, keys, _WHAT)}) > 1:
        raise ConfigError(
            f"{_WHAT}: the ranks have state of different parameters, like that of an optimizer of full matrices, which is on the "
            "rank that owns each matrix. Use torch_shard.engine_of(model).optim_state_dict(optimizer)."
        )
    wanted = not cpu_offload or runtime.collectives.world_rank == 0

    def change(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, ShardTensor):
            return tensor.clone() if tensor.dim() == 0 else tensor  # the next step counts in place
        full: torch.Tensor = tensor.detach().full_tensor()  # type: ignore[attr-defined]
        # torch drops the entries on other ranks afterwards; until then they need no memory.
        return (full.cpu() if cpu_offload else full) if wanted else full.new_empty(0)

    return map_tensors(state_dict, change)  # type: ignore[no-any-return]


def _keys(value: Any) -> Any:
    return {key: _keys(inner) for key, inner in value.items()} if isinstance(value, dict) else type(value).__name__
