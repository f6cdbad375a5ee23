"""Tensors that a block makes after the one it returns, and hands out some other way: backward comes to them first."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.compat.harness import train_both
from tests.support.marks import exhaustive, seldom
from tests.support.ranks import ranks
from torch_shard.engine import engine_of
from torch_shard.schedule.unit_state import State

WIDTH = 5


class Box:
    __slots__ = ("value",)


WAYS = {
    "argument": (lambda block, late, y, aux: aux.append(late), lambda block, y, aux: aux[0]),
    "private": (lambda block, late, y, aux: setattr(block, "_late", late), lambda block, y, aux: block._late),
    "buffer": (lambda block, late, y, aux: setattr(block, "kept", late), lambda block, y, aux: block.kept),
    "slots": (lambda block, late, y, aux: setattr(block.box, "value", late), lambda block, y, aux: block.box.value),
    "in place": (lambda block, late, y, aux: aux[0].add_(late), lambda block, y, aux: aux[0].sum()),
    "on the output": (lambda block, late, y, aux: setattr(y, "late", late), lambda block, y, aux: y.late),
}
"""How a block hands a tensor out, and how its parent takes it; `aux` is a list of the parent's."""


class Late(nn.Module):
    """Returns a tensor, and adds to the loss by another way."""

    def __init__(self, way: str, frozen: bool) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.full((WIDTH,), 1.5), requires_grad=not frozen)
        self.way = way
        self.box = Box()
        self.register_buffer("kept", torch.zeros(()), persistent=False)

    def forward(self, x: torch.Tensor, aux: list[torch.Tensor]) -> torch.Tensor:
        y = torch.tanh(self.first(x)) * self.scale
        late = (self.second(y) * self.scale).square().mean()
        WAYS[self.way][0](self, late, y, aux)
        return y


class Model(nn.Module):
    def __init__(self, way: str, frozen: bool) -> None:
        super().__init__()
        self.inp = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Late(way, frozen) for _ in range(3)])
        self.way = way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        total: Any = 0.0
        for block in self.blocks:
            aux = [x * 1.0] if self.way == "in place" else []
            x = block(x, aux)
            total = total + WAYS[self.way][1](block, x, aux)
        return total + x.sin().mean()


def _backward(model: nn.Module, x: torch.Tensor) -> None:
    model(x).backward()
    for block in model.blocks:
        block.kept = torch.zeros((), dtype=x.dtype)


@pytest.mark.parametrize("frozen", [False, *exhaustive(True)])
@pytest.mark.parametrize(
    "way", [*seldom("argument"), "private", "buffer", *seldom("slots"), "in place", *seldom("on the output")]
)
@ranks(2)
def test_a_tensor_made_after_the_one_returned_trains_like_plain(rank, world_size, way, frozen):
    train_both(lambda: Model(way, frozen), rank, world_size, run=_backward, unit_bytes=200, broadcast_buffers=False)


class Balanced(nn.Module):
    """Keeps a part of the loss in an attribute, and makes its output after that."""

    def __init__(self) -> None:
        super().__init__()
        self.gate, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.balance: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.balance = self.gate(torch.tanh(self.out(x))).square().mean()
        return self.out(x)


@ranks(2)
def test_a_loss_that_a_block_keeps_and_whose_output_is_dropped_trains_like_plain(rank, world_size):
    def run(model: nn.Module, x: torch.Tensor) -> None:
        model(x)
        sum(block.balance for block in model).backward()

    class Blocks(nn.ModuleList):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return sum(block(x) for block in self)

    train_both(lambda: Blocks(Balanced() for _ in range(3)), rank, world_size, run=run, unit_bytes=200)


@pytest.mark.parametrize("trainable", [True, *seldom(False)])
@ranks(2)
def test_a_frozen_norm_is_released_after_use(rank, world_size, trainable):
    """A part of a model that has low-rank adapters: autograd saves the frozen weights, which must not look like a user's."""

    class Adapted(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm(WIDTH).requires_grad_(trainable)
            self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
            self.adapter = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.norm(x)
            return x + self.base(y) + self.adapter(y)

    gathered = []

    def run(model: nn.Module, x: torch.Tensor) -> None:
        loss = model(x).sum()
        engine = engine_of(model)
        gathered.append(0 if engine is None else sum(u.state is not State.SHARDED for u in engine.units))
        loss.backward()

    train_both(
        lambda: nn.Sequential(*(Adapted() for _ in range(6))), rank, world_size, run=run, unit_bytes=100, prefetch=1
    )
    assert max(gathered) <= 2
