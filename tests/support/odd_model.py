"""A model with what is unusual about parameters, and what a plain copy of it says the sharded one must hold."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

import torch_shard


class Net(nn.Module):
    """Tied weights, a 0-d and a zero-element parameter, a frozen one, channels_last memory and uneven sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 5)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(5, 11), nn.Tanh(), nn.Linear(11, 5)) for _ in range(2))
        self.conv = nn.Conv2d(3, 2, 3).to(memory_format=torch.channels_last)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0, 4))
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.head = nn.Linear(5, 7)
        self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x * self.scale) + self.conv.weight.sum() + self.frozen.sum() + self.empty.sum()


def build(seed: int = 0) -> Net:
    torch.manual_seed(seed)
    return Net()


def batch(rank: int) -> torch.Tensor:
    """The tokens that a rank trains on."""
    return torch.arange(6).view(2, 3).add(rank) % 7


def assert_same(values: dict[str, torch.Tensor], plain: nn.Module) -> None:
    """Assert that a full state dict is that of the plain model, to the bit."""
    expected = plain.state_dict()
    assert list(values) == list(expected)
    for name, value in values.items():
        torch.testing.assert_close(value, expected[name], rtol=0, atol=0, msg=name)


def reference_grads(plain: Net, world_size: int) -> None:
    """Give the plain model the gradients that the ranks' batches have on average."""
    for r in range(world_size):
        (plain(batch(r)).pow(2).mean() / world_size).backward()


def trained(world_size: int, rank: int, **config: Any) -> tuple[Net, Net, torch_shard.Engine]:
    """Return a plain and a sharded model after one backward, and the engine."""
    plain, model = build(), build()
    engine = torch_shard.shard(model, **{"unit_bytes": 256, **config})
    reference_grads(plain, world_size)
    model(batch(rank)).pow(2).mean().backward()
    return plain, model, engine


def assert_grads(model: nn.Module, plain: nn.Module) -> None:
    """Assert that gradients are those of the plain model, and sharded where parameters are. Collective if any are."""
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), name
        if q.grad is not None:
            assert isinstance(p.grad, torch_shard.ShardTensor) == isinstance(p, torch_shard.ShardTensor), name
            mine = p.grad.full_tensor() if isinstance(p.grad, torch_shard.ShardTensor) else p.grad
            torch.testing.assert_close(mine, q.grad, msg=name, equal_nan=True)
