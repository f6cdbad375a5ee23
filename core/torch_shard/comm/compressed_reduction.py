"""A communication hook that sends gradients in 16 bits, like the hooks of DistributedDataParallel that compress."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from .process_group_ops import reduce_scatter_single


def compressed(state: Any, grad: torch.Tensor, output: torch.Tensor | None = None) -> None:
    """Average gradients in a narrower dtype. Collective.

    Args:
        state: the process group, and the dtype.
        grad: this rank's gradients; overwritten by the mean if each rank has all parameters.
        output: receives this rank's shard of the mean; None if each rank has all parameters.
    """
    group, dtype = state
    # Gradients are divided before the sum, so that fp16 does not overflow.
    sent = (grad / dist.get_world_size(group)).to(dtype)
    if output is None:
        dist.all_reduce(sent, group=group)
        grad.copy_(sent)
    else:
        received = torch.empty_like(output, dtype=dtype)
        reduce_scatter_single(received, sent, group=group)
        output.copy_(received)
