"""Small models, data and an optimizer for the tests of the Accelerate front end."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

FEATURES, HIDDEN, CLASSES = 12, 16, 5


class Layer(nn.Module):
    """A residual block with a normalisation."""

    def __init__(self, width: int = HIDDEN) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.linear = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Net(nn.Module):
    """A classifier of two layers; :data:`FEATURES` in, :data:`CLASSES` out."""

    def __init__(self, features: int = FEATURES, classes: int = CLASSES) -> None:
        super().__init__()
        self.embed = nn.Linear(features, HIDDEN)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.head = nn.Linear(HIDDEN, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def net(seed: int = 0, **options: Any) -> Net:
    """A :class:`Net` with the same weights on all ranks."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Net(**options)


def dataset(size: int = 24, seed: int = 1) -> TensorDataset:
    """`size` random inputs [FEATURES] with classes, the same on all ranks."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, FEATURES, generator=generator)
    y = torch.randint(0, CLASSES, (size,), generator=generator)
    return TensorDataset(x, y)


def loader(size: int = 24, batch_size: int = 4, seed: int = 1, **options: Any) -> DataLoader[Any]:
    """Batches of :func:`dataset`, which ``prepare`` distributes over the ranks."""
    return DataLoader(dataset(size, seed), batch_size=batch_size, **options)


def sgd(params: Any) -> torch.optim.Optimizer:
    """The optimizer that shows a wrong scale of gradients, which Adam hides."""
    return torch.optim.SGD(params, lr=0.2, momentum=0.9)


def loss_of(model: nn.Module, batch: Any) -> torch.Tensor:
    x, y = batch
    return nn.functional.cross_entropy(model(x).float(), y)
