"""FSDP's auto-wrap policies as :attr:`ShardConfig.units`: which modules are units."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from torch import nn

from torch_shard.frontend.fsdp_settings import Wrapped

__all__ = ["WholeModel", "Wrapped", "size_based"]


@dataclass(frozen=True)
class WholeModel:
    """``NO_WRAP``: everything is gathered at once."""

    def __call__(self, name: str, module: nn.Module) -> bool:
        return name == ""


def size_based(min_num_params: int) -> Wrapped | None:
    """Return ``SIZE_BASED_WRAP`` as units; None, the automatic plan, for 0, with which Accelerate wraps nothing."""
    from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy

    if min_num_params <= 0:
        return None
    return Wrapped(functools.partial(size_based_auto_wrap_policy, min_num_params=min_num_params))
