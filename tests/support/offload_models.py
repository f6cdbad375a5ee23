"""A small model whose layers' inputs are just big enough to be offloaded."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch import nn

from torch_shard.activation_checkpointing import checkpointed_layers, offload_of
from torch_shard.activation_offload import MIN_BYTES, ActivationOffload

WIDTH = 64
ROWS = MIN_BYTES // (4 * WIDTH)  # of a batch in fp32


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, 2 * WIDTH)
        self.outer = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        y = self.outer(torch.tanh(self.inner(x)))
        if mask is not None:
            y = y * mask
        return x + nn.functional.dropout(y, 0.1, self.training)


class Net(nn.Module):
    """Notes for each layer whether the memory of the inputs of all layers so far is still there when it begins."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.inputs: list[weakref.ref[Any]] = []
        self.there: list[list[bool]] = []

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        self.inputs, self.there = [], []
        x = self.first(x)
        for layer in self.layers:
            self.inputs.append(weakref.ref(x.untyped_storage()))
            x = layer(x, mask=mask)
            self.there.append(self.kept())
        return x.square().mean()

    def kept(self) -> list[bool]:
        """Of which layers the input has its memory."""
        return [ref() is not None for ref in self.inputs]


def batch(step: int = 0, rank: int = 0) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(100 * step + rank))


def net(offloaded: Any = True, chosen: Any = False, layers: int = 4) -> Net:
    """Its layers checkpointed and offloaded; with both False neither."""
    torch.manual_seed(0)
    model = Net(layers)
    with checkpointed_layers(model, chosen, None, offloaded):
        pass
    return model


def offload_in(model: nn.Module) -> ActivationOffload:
    found = offload_of(model)
    assert found is not None
    return found


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def equal(a: list[torch.Tensor], b: list[torch.Tensor]) -> bool:
    return len(a) == len(b) > 0 and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))
