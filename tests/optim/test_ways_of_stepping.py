"""Optimizers that are written in other ways than torch's, and things that are done between their steps."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torch_shard
from tests.compat.harness import Pair, batch, plain_backward, same
from tests.support.marks import exhaustive, quick
from tests.support.ranks import ranks
from torch_shard.errors import ShardError

O = torch.optim


class Wide(nn.Module):
    """Slices that are stepped by themselves, and small ones that are stepped together; `alone` is not sharded."""

    def __init__(self) -> None:
        super().__init__()
        self.inp, self.mid, self.head = nn.Linear(5, 200), nn.Linear(200, 200), nn.Linear(200, 3)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.alone = nn.Parameter(torch.randn(3))
        self.late = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.head(torch.tanh(self.mid(torch.tanh(self.inp(x))))) * self.scale
        return x if self.late else x + self.alone.sin()


def averaged_backward(model, x):
    """Parameters that are not sharded have each rank's own gradient."""
    loss = plain_backward(model, x)
    if torch_shard.engine_of(model) is not None and model.alone.grad is not None:
        dist.all_reduce(model.alone.grad)
        model.alone.grad /= dist.get_world_size()
    return loss


class Own(O.Optimizer):
    def __init__(self, params, lr=0.01):
        super().__init__(params, {"lr": lr})

    def update(self, p, lr):
        average = self.state[p].setdefault("average", torch.zeros_like(p))
        average.mul_(0.9).add_(p.grad)
        p.sub_(average, alpha=lr)

    def params(self):
        return [(p, g["lr"]) for g in self.param_groups for p in g["params"] if p.grad is not None]

    @torch.no_grad()
    def step(self, closure=None):
        for p, lr in self.params():  # what is collected first is worked on behind the loop
            self.update(p, lr)


class AssignsData(Own):
    def update(self, p, lr):
        p.data = p.data - lr * p.grad


class LoopsTwice(Own):
    @torch.no_grad()
    def step(self, closure=None):
        next(iter(self.param_groups))
        for group in self.param_groups:
            for p in group["params"]:
                if p not in self.state:
                    self.state[p] = {"average": torch.zeros_like(p)}
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None and p.requires_grad:
                    self.update(p, max(g["lr"] for g in self.param_groups))


class NewState(Own):
    def update(self, p, lr):
        average = self.state.get(p, {"average": 0.0})["average"] * 0.9 + p.grad
        self.state[p] = {"average": average}
        p.sub_(average, alpha=lr)


WAYS = [Own, AssignsData, LoopsTwice, NewState]
for way in WAYS:
    torch_shard.optim.register(way, kind="elementwise")


@pytest.mark.parametrize("kind", quick(WAYS, [Own, AssignsData]))
@ranks(2, exhaustive=(1, 3))
def test_a_declared_optimizer_may_be_written_in_any_way(rank, world_size, kind):
    pair = Pair(Wide, rank, world_size, optimizer=lambda m: kind(m.parameters()), ignore=["alone"])
    for step in range(4):
        pair.model.late = pair.plain.late = step == 2 and kind is not LoopsTwice
        pair.step(averaged_backward, batch(rank, step))
        assert pair.optimizer.state.keys() <= set(pair.model.parameters())
    pair.check()
    for p, q in zip(pair.model.parameters(), pair.plain.parameters(), strict=True):
        for key, value in pair.plain_optimizer.state.get(q, {}).items():
            same(pair.optimizer.state[p][key], value, key)


@pytest.mark.parametrize("make", [O.SGD, *exhaustive(O.RMSprop)])
@ranks(2)
def test_parameters_that_are_not_sharded_step_with_the_state_that_was_loaded(rank, world_size, make):
    def optimizer(model):
        rest = [p for p in model.parameters() if p is not model.alone]
        return make([{"params": rest}, {"params": [model.alone], "momentum": 0.9}], lr=0.01)

    pair = Pair(Wide, rank, world_size, optimizer=optimizer, ignore=["alone"])
    for step in range(2):
        pair.step(averaged_backward, batch(rank, step))
    saved = [copy.deepcopy(o.state_dict()) for o in (pair.optimizer, pair.plain_optimizer)]
    pair.step(averaged_backward, batch(rank, 2))
    for o, state in zip((pair.optimizer, pair.plain_optimizer), saved, strict=True):
        o.load_state_dict(state)
    for step in range(3, 5):
        pair.step(averaged_backward, batch(rank, step))
    pair.check()
    own = pair.optimizer.state[pair.model.alone]["momentum_buffer"]
    same(own, pair.plain_optimizer.state[pair.plain.alone]["momentum_buffer"])


class Fallback(O.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure=None):
        for p in self.param_groups[0]["params"]:
            try:
                p.sub_(0.1 * p.grad)
                _ = p.grad @ p.grad.T
            except RuntimeError:
                p.mul_(0.5)


@ranks(2)
def test_an_unknown_optimizer_that_catches_the_refusal_does_not_go_on_in_silence(rank, world_size):
    pair = Pair(Wide, rank, world_size)
    optimizer = Fallback([pair.model.mid.weight])
    plain_backward(pair.model, batch(rank, 0))
    with pytest.raises(ShardError, match=r"Fallback.*register"):
        optimizer.step()


@pytest.mark.exhaustive
@ranks(2)
def test_a_compiled_step_is_refused_by_name(rank, world_size):
    pair = Pair(Wide, rank, world_size, optimizer=lambda m: O.SGD(m.parameters(), lr=0.01))
    pair.backward(plain_backward, batch(rank, 0))
    step = torch.compile(lambda: pair.optimizer.step(), backend="eager")
    with warnings.catch_warnings(), pytest.raises(ShardError, match=r"SGD.*torch\.compile"):
        warnings.simplefilter("ignore")
        step()
    pair.check()
    pair.update()
    pair.check()


@ranks(2)
def test_what_is_kept_between_steps_keeps_neither_old_state_nor_gradients_nor_the_optimizer(rank, world_size):
    pair = Pair(Wide, rank, world_size, optimizer=lambda m: O.AdamW(m.parameters(), lr=0.01))
    for step in range(2):
        pair.step(plain_backward, batch(rank, step))
    state = pair.optimizer.state[pair.model.mid.weight]
    memory = weakref.ref(state["exp_avg"]._shard_state.flat)
    copied = copy.deepcopy(pair.optimizer.state_dict())
    del state
    pair.optimizer.load_state_dict(copied)
    gc.collect()
    assert memory() is None
    plain_backward(pair.model, batch(rank, 2))
    gradient = weakref.ref(pair.model.mid.weight.grad._shard_state.flat)
    pair.optimizer.step()
    pair.optimizer.zero_grad()
    assert gradient() is None
    optimizer = weakref.ref(pair.optimizer)
    pair.optimizer = None
    gc.collect()
    assert optimizer() is None


@ranks(2)
def test_gradients_from_before_stepping_in_backward_are_refused(rank, world_size):
    pair = Pair(Wide, rank, world_size)
    plain_backward(pair.model, batch(rank, 0))
    pair.engine.step_in_backward(pair.optimizer)
    with pytest.raises(ShardError, match="gradient from before"):
        plain_backward(pair.model, batch(rank, 0))
    pair.check()
