"""Backwards inside a backward, as reentrant checkpoints run them: units live as long as they are needed, and no longer."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from torch.utils.checkpoint import checkpoint

import torch_shard
from tests.compat.harness import Pair, batch, plain_backward, train_both
from tests.support.ranks import ranks
from torch_shard.schedule.unit_state import State


class Around(nn.Module):
    """Its own parameters are used before and behind a layer that is recomputed, and all are one unit."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Parameter(torch.randn(5, 7)), nn.Parameter(torch.randn(7, 5))
        self.layer = nn.Linear(7, 7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.layer, x @ self.first, use_reentrant=True).tanh() @ self.last


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp, self.around = nn.Linear(5, 5), Around()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.around(self.inp(x))


@ranks(2)
def test_a_unit_stays_while_the_outer_backward_needs_it(rank: int, world_size: int) -> None:
    inner = ["around.first", "around.last", "around.layer.weight", "around.layer.bias"]
    train_both(Model, rank, world_size, units=[inner])


class Steered(nn.Module):
    """Takes the slope of what it has computed before into account, as models of forces do."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5, 5))

    def forward(self, x: torch.Tensor, source: torch.Tensor | None = None) -> torch.Tensor:
        if source is not None:
            (slope,) = torch.autograd.grad(x.square().sum(), source, retain_graph=True)
            x = x + slope
        return (x @ self.weight).tanh()


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp, self.steered = nn.Linear(5, 5), Steered()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        source = x.detach().requires_grad_()
        return self.steered(self.steered(self.inp(source)), source)


@ranks(2)
def test_a_unit_stays_while_its_own_forward_runs_a_backward_through_it(rank: int, world_size: int) -> None:
    train_both(Twice, rank, world_size, units=[nn.Linear, Steered])


class Chain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(5, 5)
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for i, block in enumerate(self.blocks):
            x = (checkpoint(block, x, use_reentrant=True) if i > 2 else block(x)).tanh()
        return x


@ranks(2)
def test_one_unit_is_gathered_at_a_time(rank: int, world_size: int) -> None:
    pair = Pair(Chain, rank, world_size, units=[nn.Linear], prefetch=1)
    held: list[int] = []

    def count(*_: Any) -> None:
        held.append(sum(unit.state is State.FULL for unit in pair.engine.units))

    for layer in (*pair.model.blocks, pair.model.inp):
        layer.register_full_backward_hook(count)
    for step in range(2):
        pair.step(plain_backward, batch(rank, step))
    assert held == [1] * 14, held
    pair.check()


class Recomputed(nn.Module):
    """Every layer is in a checkpoint, so that the loss's own graph has no part of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(5, 5) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=True).tanh()
        return x


@ranks(2)
def test_a_model_that_is_met_in_nested_backwards_alone_has_one_end(rank: int, world_size: int) -> None:
    pair = Pair(Recomputed, rank, world_size, units=[nn.Linear])
    for step in range(2):
        pair.step(plain_backward, batch(rank, step))
    with profile(activities=[ProfilerActivity.CPU]) as profiled:
        pair.step(plain_backward, batch(rank, 2))
    pair.check()
    names = [event.name for event in profiled.events()]
    assert sum("reduction of unit" in name and "wait" not in name for name in names) == 4
    assert names.count("torch_shard: wait for the end of backward") <= 1


@ranks(2)
def test_two_engines_that_are_met_in_nested_backwards_alone_end_in_one_order(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    plain = [Recomputed() for _ in range(2)]
    models = copy.deepcopy(plain)
    for model in models:
        torch_shard.shard(model, units=[nn.Linear])
    for step in range(3):
        for first, second in (plain, models):
            first.zero_grad()
            second.zero_grad()
            x = torch.full((2, 5), 0.1 * (step + 1))
            (first(x).square().sum() + second(x).square().sum()).backward()
    for one, other in zip(plain, models, strict=True):
        for p, q in zip(one.parameters(), other.parameters(), strict=True):
            torch.testing.assert_close(q.grad.full_tensor(), p.grad)


class Inner(torch.autograd.Function):
    """Trains a model in its backward, which has a graph of its own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, train: Any) -> torch.Tensor:
        ctx.train = train
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        with torch.enable_grad():
            ctx.train()
        return grads[0], None


@ranks(2)
def test_a_whole_training_step_inside_another_models_backward(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
    sharded = copy.deepcopy(plain)
    torch_shard.shard(sharded, units=[nn.Linear])
    for model in (plain, sharded):
        optimizer = torch.optim.SGD(model.parameters(), 0.1)

        def train(model: Any = model, optimizer: Any = optimizer) -> None:
            for _ in range(2):
                model(torch.ones(2, 5)).square().sum().backward()
                optimizer.step()
                optimizer.zero_grad()

        Inner.apply(torch.ones(1, requires_grad=True), train).sum().backward()
    for p, q in zip(plain.parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(q.full_tensor(), p)
