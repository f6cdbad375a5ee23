"""Sharded data-parallel training for plain PyTorch models: ``engine = torch_shard.shard(model)``."""

from __future__ import annotations

from . import errors, optim, optim_state
from .comm.traffic_statistics import Statistics
from .config.precision import Precision, norms_in
from .config.quantization import Quantized
from .config.shard_config import ShardConfig
from .deferred_init import from_files
from .engine import Engine, engine_of, shard
from .errors import ShardError
from .offload import Offload
from .plan.plan import Plan
from .plan.planner import make_plan
from .shard_tensor.tensor import ShardTensor
from .versions import __version__

__all__ = [
    "Engine",
    "Offload",
    "Plan",
    "Precision",
    "Quantized",
    "ShardConfig",
    "ShardError",
    "ShardTensor",
    "Statistics",
    "__version__",
    "engine_of",
    "errors",
    "from_files",
    "make_plan",
    "norms_in",
    "optim",
    "optim_state",
    "shard",
]
