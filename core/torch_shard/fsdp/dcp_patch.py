"""What ``torch.distributed.checkpoint.state_dict`` does for torch's own classes, for models of :mod:`torch_shard.fsdp`.

It asks for ShardTensors whatever ``state_dict_type`` is set, as it does with torch's FullyShardedDataParallel, where whole ones
are the default. With ``full_state_dict=True`` it would hand them out as they are: what is saved as whole would be one rank's
slices. The function of torch's in which whole tensors are made is wrapped, so that it gets them whole.
"""

from __future__ import annotations

import functools
import zlib
from typing import Any

import torch

from ..errors import ConfigError
from ..optim.matrix.state import everyone, mapped
from ..runtime.registry import runtime_of
from ..runtime.runtime import Runtime
from ..shard_tensor.tensor import ShardTensor
from ..state_dict_type import as_shards
from ..unit.unit import unit_of

__all__ = ["install"]

_WHAT = "get_state_dict(full_state_dict=True)"


@functools.cache
def install() -> None:
    """Wrap its functions, once. Private; torch 2.13."""
    from torch.distributed.checkpoint import state_dict as dcp

    original = dcp._maybe_full_or_cpu_state_dict

    @functools.wraps(original)
    def with_shards(state_dict: dict[str, Any], info: Any) -> dict[str, Any]:
        runtime = _runtime(info) if info.full_state_dict else None
        return original(state_dict if runtime is None else _whole(runtime, state_dict, info.cpu_offload), info)

    dcp._maybe_full_or_cpu_state_dict = with_shards
    dcp._get_model_state_dict = as_shards()(dcp._get_model_state_dict)
    dcp._load_model_state_dict = as_shards()(dcp._load_model_state_dict)


def _runtime(info: Any) -> Runtime | None:
    """Of the sharded model that a call of torch's is about."""
    for param in info.fqn_param_mapping.values():
        unit = unit_of(param)
        if unit is not None:
            return runtime_of(unit)
    return None


def _whole(runtime: Runtime, state_dict: dict[str, Any], cpu_offload: bool) -> dict[str, Any]:
    """`state_dict` with whole tensors in new memory; on rank 0 alone where they go to the CPU. Collective."""
    keys = zlib.crc32(repr(_keys(state_dict)).encode()).to_bytes(4, "little")
    if len({tuple(each) for each in everyone(runtime, keys, _WHAT)}) > 1:
        raise ConfigError(
            f"{_WHAT}: the ranks have state of different parameters, as of an optimizer that steps on whole matrices, each at "
            "the rank that owns it. Use torch_shard.engine_of(model).optim_state_dict(optimizer)."
        )
    wanted = not cpu_offload or runtime.collectives.world_rank == 0

    def change(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, ShardTensor):
            return tensor.clone() if tensor.dim() == 0 else tensor  # the next step counts in place
        full: torch.Tensor = tensor.detach().full_tensor()  # type: ignore[attr-defined]
        # The others' entries are dropped behind this; until then they need no memory.
        return (full.cpu() if cpu_offload else full) if wanted else full.new_empty(0)

    return mapped(state_dict, change)  # type: ignore[no-any-return]


def _keys(value: Any) -> Any:
    return {key: _keys(inner) for key, inner in value.items()} if isinstance(value, dict) else type(value).__name__
