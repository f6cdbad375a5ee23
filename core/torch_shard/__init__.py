"""Sharded data-parallel training for plain PyTorch models: ``engine = torch_shard.shard(model)``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

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
from .shard_tensor.tensor import ShardTensor
from .versions import __version__

if TYPE_CHECKING:
    from .plan.planner import make_plan

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


def __getattr__(name: str) -> Any:
    if name == "make_plan":  # training needs it in ``shard()`` only
        from .plan.planner import make_plan

        return make_plan
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
