"""Placement on this rank's device of what sharding does not move there."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from torch_shard import ShardTensor

__all__ = ["before_sharding", "left_behind"]


def before_sharding(model: nn.Module, device: torch.device) -> None:
    """Move parameters and buffers to `device` if there is no process group to say which device is meant.

    One by one, in the same objects; those on meta get their memory on the device anyway. Not collective.
    """
    if not (dist.is_available() and dist.is_initialized()):
        left_behind(model, device)
        for module in model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device.type == "cpu" != device.type:
                    module._buffers[name] = buffer.to(device)


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
