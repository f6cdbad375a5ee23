"""Replacement of torch's classes by ours in all modules that know them, for scripts that are not edited."""

from __future__ import annotations

import sys
from typing import Any

import torch.distributed.fsdp
import torch.nn.parallel

from .. import fsdp
from ..frontend.launch import replace_everywhere
from ..fsdp import deferred_wrap
from . import distributed_data_parallel
from .settings import Overrides

# torch's own modules keep torch's classes, with which they compare a model's: ours is a subclass of DistributedDataParallel, and
# our FSDP models are not torch's.
_KEEP = ("torch", "torch_shard")
_OF_DDP = ("torch.nn.parallel", "torch.nn.parallel.distributed")
_OF_FSDP = (
    "torch.distributed.fsdp",
    "torch.distributed.fsdp.fully_sharded_data_parallel",
    "torch.distributed.fsdp._fully_shard",
    "torch.distributed._composable.fsdp",
)


def replace_ddp(overrides: Overrides) -> None:
    """Make torch's DistributedDataParallel ours from now on, with these settings. Not collective."""
    distributed_data_parallel.use(overrides)
    stock = distributed_data_parallel.DistributedDataParallel.__base__
    _replace(stock, distributed_data_parallel.DistributedDataParallel, _OF_DDP)


def replace_fsdp(overrides: Overrides) -> None:
    """Make torch's FullyShardedDataParallel and fully_shard ours from now on, with these settings. Not collective."""
    deferred_wrap.override_settings(overrides.for_model)
    for name in fsdp.__all__:
        stock, ours = getattr(torch.distributed.fsdp, name, None), getattr(fsdp, name)
        if stock is not None and stock is not ours:
            _replace(stock, ours, _OF_FSDP)


def _replace(stock: Any, ours: Any, public: tuple[str, ...]) -> None:
    replace_everywhere(stock, ours, _KEEP)
    for module in filter(None, map(sys.modules.get, public)):
        for name in [name for name, value in vars(module).items() if value is stock]:
            setattr(module, name, ours)
