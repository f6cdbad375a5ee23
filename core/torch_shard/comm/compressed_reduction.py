"""Communication hooks that send gradients in 16 bits, as those of DistributedDataParallel do that compress."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from ..errors import UnavailableError
from .process_group_ops import reduce_scatter_single

__all__ = ["hook_for"]


def hook_for(replicated: bool) -> Callable[..., Any]:
    """Return a hook for ``Engine.register_comm_hook``, whose state is the pair (process group, dtype). Not collective.

    Args:
        replicated: each rank has all parameters, so that gradients are all-reduced and not reduce-scattered.

    Raises:
        UnavailableError: this build of torch has no reduce-scatter.
    """
    if not replicated and reduce_scatter_single is None:
        raise UnavailableError(
            "a communication hook that compresses gradients needs torch.distributed with reduce_scatter, which this build of "
            "torch lacks. Leave the hook out, or use the strategy 'no_shard'."
        )
    return _all_reduce if replicated else _reduce_scatter


def _reduce_scatter(state: Any, grad: torch.Tensor, output: torch.Tensor) -> None:
    group, dtype = state
    # Gradients are divided before the sum, so that fp16 does not overflow.
    sent = (grad / dist.get_world_size(group)).to(dtype)
    received = torch.empty_like(output, dtype=dtype)
    assert reduce_scatter_single is not None
    reduce_scatter_single(received, sent, group=group)
    output.copy_(received)


def _all_reduce(state: Any, grad: torch.Tensor) -> None:
    group, dtype = state
    sent = (grad / dist.get_world_size(group)).to(dtype)
    dist.all_reduce(sent, group=group)
    grad.copy_(sent)
