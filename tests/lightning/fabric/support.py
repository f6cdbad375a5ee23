"""Small models, and a Fabric whose ranks are those of the test."""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import lightning_shard
from tests.lightning.support import quiet

assert lightning_shard  # its import makes the names known where autoloading is off

NAMESPACES = ["lightning.fabric", "lightning_fabric"]


class Net(nn.Module):
    """Blocks, a buffer, a parameter of the root's own, and a method beside forward."""

    def __init__(self, width: int = 7) -> None:
        super().__init__()
        self.inner = nn.Linear(6, width)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(width, width), nn.LayerNorm(width)) for _ in range(2))
        self.head = nn.Linear(width, 3)
        self.scale = nn.Parameter(torch.full((3,), 1.5))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.encode(x)) * self.scale

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return x

    def loss(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """The loss, of a forward within."""
        return (self(x) - y).square().mean()


def net(seed: int = 5) -> Net:
    torch.manual_seed(seed)
    return Net()


def batch(step: int, rows: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part of a step's batch."""
    generator = torch.Generator().manual_seed(100 + step)
    x = torch.randn(rows * dist.get_world_size(), 6, generator=generator)
    y = x.cumsum(-1)[:, ::2].contiguous()
    rank, world = dist.get_rank(), dist.get_world_size()
    return x[rank::world], y[rank::world]


def fabric(strategy: Any = "shard", namespace: str = "lightning.fabric", **options: Any) -> Any:
    """A launched Fabric on the CPU, in the process group that the ranks have already."""
    quiet()
    made = importlib.import_module(namespace).Fabric(
        accelerator="cpu", devices=dist.get_world_size(), strategy=strategy, **options
    )
    made.launch()
    return made


def strategy(namespace: str = "lightning.fabric", **options: Any) -> Any:
    return lightning_shard.registration.registry.strategy_class(namespace)(**options)


def whole(module: Any) -> dict[str, torch.Tensor]:
    """The whole state dict on every rank, whatever the strategy. Collective."""
    return {
        name: value.clone() for name, value in module._strategy.get_module_state_dict(module._forward_module).items()
    }


def assert_same(found: Any, expected: Any, **tolerance: float) -> None:
    tolerance = tolerance or {"rtol": 1e-5, "atol": 1e-7}
    torch.testing.assert_close(dict(found), dict(expected), **tolerance)
