"""torch's two FSDP interfaces over :func:`torch_shard.shard`: import from ``torch_shard.fsdp`` in place of
``torch.distributed.fsdp``."""

from __future__ import annotations

import torch.distributed.fsdp as _torchs
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy

from ..optim_state import OptimStateKeyType
from . import api
from ._fully_shard import FSDPModule, UnshardHandle, fully_shard, register_fsdp_forward_method, share_comm_ctx
from .api import *  # noqa: F403
from .fully_sharded_data_parallel import FullyShardedDataParallel

__all__ = [
    *api.__all__,
    "CPUOffloadPolicy",
    "FSDPModule",
    "FullyShardedDataParallel",
    "MixedPrecisionPolicy",
    "OffloadPolicy",
    "OptimStateKeyType",
    "UnshardHandle",
    "fully_shard",
    "register_fsdp_forward_method",
    "share_comm_ctx",
]

if hasattr(_torchs, "DataParallelMeshDims"):  # newer than the oldest torch that is supported
    from torch.distributed.fsdp import DataParallelMeshDims as DataParallelMeshDims

    __all__ += ["DataParallelMeshDims"]
