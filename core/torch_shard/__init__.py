"""Sharded data-parallel training for plain PyTorch models: ``engine = torch_shard.shard(model)``."""

from __future__ import annotations

from . import errors, optim, optim_state
from .config import ShardConfig
from .deferred import from_files
from .engine import Engine, engine_of, shard
from .errors import ShardError
from .offload import Offload
from .plan import Plan
from .planner import make_plan
from .precision import Precision
from .quantized import Quantized
from .shard_tensor import ShardTensor
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
    "__version__",
    "engine_of",
    "errors",
    "from_files",
    "make_plan",
    "optim",
    "optim_state",
    "shard",
]
