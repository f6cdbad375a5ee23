"""Parameters that are not sharded, and that therefore nothing else moves to the device."""

from __future__ import annotations

import torch
from torch import nn

from torch_shard import ShardTensor

__all__ = ["left_behind"]


def left_behind(model: nn.Module, device: torch.device) -> None:
    """Move parameters that are not sharded (``ShardPlugin.ignore``) from the CPU to `device`, in the same objects."""
    if device.type == "cpu":
        return
    with torch.no_grad():
        for p in model.parameters():
            if not isinstance(p, ShardTensor) and p.device.type == "cpu":
                p.data = p.data.to(device)
                if p.grad is not None:
                    p.grad = p.grad.to(device)
