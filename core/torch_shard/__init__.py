"""Sharded data-parallel training for plain PyTorch models: ``engine = torch_shard.shard(model)``."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from . import errors, optim
from .comm.traffic_statistics import Statistics
from .config.precision import Precision, norms_in
from .config.quantization import Quantized
from .config.shard_config import ShardConfig
from .engine import Engine, engine_of, shard
from .errors import ShardError
from .offload import Offload
from .plan.plan import Plan
from .shard_tensor.tensor import ShardTensor
from .versions import __version__

if TYPE_CHECKING:
    from . import optim_state
    from .deferred_init import from_files
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


_LAZY = {"from_files": "deferred_init", "make_plan": "plan.planner", "optim_state": "optim_state"}
"""Names that few programs use themselves, with their modules, which are imported at the first use."""


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module = importlib.import_module(f".{_LAZY[name]}", __name__)
    return getattr(module, name, module)  # optim_state is the module itself


def __dir__() -> list[str]:
    return sorted({*globals(), *_LAZY})
