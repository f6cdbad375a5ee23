"""Small models, and a Fabric whose ranks are those of the test."""

from __future__ import annotations

import importlib
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from tests.lightning.support import quiet, shard_strategy

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
    return shard_strategy(namespace, **options)


def whole(module: Any) -> dict[str, torch.Tensor]:
    """The whole state dict on every rank, whatever the strategy. Collective."""
    return {
        name: value.clone() for name, value in module._strategy.get_module_state_dict(module._forward_module).items()
    }


def assert_same(found: Any, expected: Any, **tolerance: float) -> None:
    tolerance = tolerance or {"rtol": 1e-5, "atol": 1e-7}
    torch.testing.assert_close(dict(found), dict(expected), **tolerance)


def trained(
    strategy: Any, *, apart: bool = False, accumulate: int = 1, clip: dict[str, float] | None = None, **options: Any
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Losses and norms of some steps, and the weights after them."""
    f = fabric(strategy, **options)
    model: Any = net()
    if apart:
        model = f.setup_module(model)
        optimizer = f.setup_optimizers(torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    else:
        model, optimizer = f.setup(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    found = []
    for step in range(4):
        for micro in range(accumulate):
            x, y = batch(step * accumulate + micro)
            with f.no_backward_sync(model, enabled=micro + 1 < accumulate):
                loss = (model(x) - y).square().mean() / accumulate
                f.backward(loss)
            found.append(f.all_reduce(loss.detach().clone()))
        if clip is not None:
            norm = f.clip_gradients(model, optimizer, **clip)
            if norm is not None:
                found.append(norm.detach().clone())
        optimizer.step()
        optimizer.zero_grad()
    return found, whole(model)


def assert_trains_like_ddp(
    name: Any = "shard", namespace: str = "lightning.fabric", rtol: float = 1e-5, atol: float = 1e-7, **how: Any
) -> None:
    losses, weights = trained(name, namespace=namespace, **how)
    expected_losses, expected_weights = trained("ddp", namespace=namespace, **how)
    torch.testing.assert_close(losses, expected_losses, rtol=rtol, atol=atol)
    assert_same(weights, expected_weights, rtol=rtol, atol=atol)
