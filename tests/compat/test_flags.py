"""Flags of parameters that change between a forward and its backward: the graph that forward recorded decides."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.compat.harness import (
    MLP,
    Block,
    Checkpointed,
    Pair,
    average_grads,
    batch,
    loss_of,
    plain_backward,
    same_grads,
    train_both,
)
from tests.support.inside import runtime_of
from tests.support.marks import exhaustive, seldom
from tests.support.ranks import ranks


def everything(model: nn.Module) -> list[nn.Parameter]:
    return list(model.parameters())


def a_block(model: nn.Module) -> list[nn.Parameter]:
    return list(model.blocks[1].parameters())


def one_of_a_unit(model: nn.Module) -> list[nn.Parameter]:
    return [model.blocks[1].down.weight]


PARTS = [everything, a_block, one_of_a_unit]
MOSTLY_A_BLOCK = [*seldom(everything), a_block, *seldom(one_of_a_unit)]
MOSTLY_ONE_OF_A_UNIT = [*seldom(everything, a_block), one_of_a_unit]


@contextlib.contextmanager
def off(params: list[nn.Parameter]) -> Iterator[None]:
    """The flags of these parameters are off."""
    for p in params:
        p.requires_grad_(False)
    yield
    for p in params:
        p.requires_grad_(True)


def _reentrant() -> nn.Module:
    return Checkpointed(reentrant=True)


REFERENCES = [
    (MLP, a_block, False),
    (Checkpointed, everything, False),
    *seldom((MLP, everything, False), (MLP, one_of_a_unit, False), (_reentrant, everything, False)),
    *exhaustive(*((MLP, part, True) for part in PARTS)),
    *exhaustive(*((build, part, False) for build in (Checkpointed, _reentrant) for part in (a_block, one_of_a_unit))),
]


@ranks(1, 2, exhaustive=(3,))
@pytest.mark.parametrize(("build", "part", "recorded"), REFERENCES)
def test_a_frozen_reference_forward_before_the_backward_trains_like_plain(rank, world_size, build, part, recorded):
    def run(model, x):
        h = model(x)
        with torch.set_grad_enabled(recorded), off(part(model)):
            reference = model(x.flip(0))
        (loss_of(h) + (h - reference.detach()).pow(2).mean()).backward()

    train_both(build, rank, world_size, run=run, unit_bytes=300).train(3)


@ranks(2)
@pytest.mark.parametrize("part", MOSTLY_A_BLOCK[1:])
def test_two_forwards_under_different_flags_in_one_loss_train_like_plain(rank, world_size, part):
    def run(model, x):
        h = model(x)
        with off(part(model)):
            other = model(h.detach()[:, :1] + x)
        last = model(x * 2)
        (loss_of([h, other, last]) / 4).backward()  # gradients of about 1: mixed precision rounds sums of larger ones

    train_both(MLP, rank, world_size, unit_bytes=300, run=run)


@ranks(1, 2)
@pytest.mark.parametrize("part", MOSTLY_ONE_OF_A_UNIT)
def test_flags_turned_on_behind_a_forward_give_no_gradient_as_in_plain(rank, world_size, part):
    def run(model, x):
        with off(part(model)):
            h = model(x.clone().requires_grad_())
        loss_of(h).backward()

    train_both(MLP, rank, world_size, run=run, steps=2, unit_bytes=300).train(2)


@ranks(2)
@pytest.mark.parametrize("part", MOSTLY_A_BLOCK)
def test_parameters_frozen_behind_the_forward_get_no_gradient_as_in_plain(rank, world_size, part):
    def run(model, x):
        h = model(x)
        with off(part(model)):
            loss_of(h).backward()

    train_both(MLP, rank, world_size, run=run, steps=2, unit_bytes=300).train(2)


def _accumulate(pair: Pair, rank: int, run: Callable[..., None], count: int) -> None:
    """Take two steps of `count` backwards each, of which the last one reduces."""
    for step in range(2):
        for micro in range(count):
            last = micro == count - 1
            for model in (pair.model, pair.plain):
                with contextlib.nullcontext() if last or model is pair.plain else pair.engine.no_sync():
                    run(model, batch(rank, count * step + micro), last)
        average_grads(pair.plain)
        same_grads(pair.model, pair.plain)
        pair.update()
    pair.check()


@ranks(2)
@pytest.mark.parametrize("part", MOSTLY_ONE_OF_A_UNIT)
def test_frozen_reference_forwards_under_accumulation_train_like_plain(rank, world_size, part):
    def run(model, x, last):
        h = model(x)
        with torch.no_grad(), off(part(model)):
            reference = model(x.flip(0))
        (loss_of(h) + (h - reference).pow(2).mean()).backward()

    _accumulate(Pair(MLP, rank, world_size, unit_bytes=300), rank, run, 3)


@ranks(2)
@pytest.mark.parametrize("part", MOSTLY_A_BLOCK)
def test_what_was_accumulated_is_reduced_by_a_backward_without_those_parameters(rank, world_size, part):
    def run(model, x, last):
        with off(part(model)) if last else contextlib.nullcontext():
            loss_of(model(x.clone().requires_grad_() if last else x)).backward()

    _accumulate(Pair(MLP, rank, world_size, unit_bytes=300), rank, run, 2)


@ranks(2)
@pytest.mark.parametrize("retain", [False, *seldom(True)])
def test_several_backwards_behind_a_frozen_reference_forward_train_like_plain(rank, world_size, retain):
    def run(model, x):
        h = model(x)
        losses = [loss_of(h), h.exp().mean()] if retain else [loss_of(h), loss_of(model(x * 2))]
        with torch.no_grad(), off(everything(model)):
            reference = model(x)
        losses[0].backward(retain_graph=retain)
        (losses[1] + reference.sum()).backward()

    pair = Pair(MLP, rank, world_size, unit_bytes=300)
    for step in range(2):
        # Each backward is averaged by itself under the engine; the mean is linear.
        pair.step(run, batch(rank, step))
    pair.check()


@pytest.mark.parametrize("by", ["autograd.grad", "inputs"])
@ranks(2)
def test_gradients_of_given_parameters_behind_a_frozen_reference_forward_train_like_plain(rank, world_size, by):
    def run(model, x):
        h = model(x)
        with torch.no_grad(), off(everything(model)):
            model(x)
        if by == "inputs":
            loss_of(h).backward(inputs=[model.head.weight, model.blocks[0].up.weight])
        else:
            for p, g in zip(model.parameters(), torch.autograd.grad(loss_of(h), everything(model)), strict=True):
                p.grad = g

    train_both(MLP, rank, world_size, unit_bytes=300, run=run, steps=2)


@ranks(2)
def test_layers_frozen_while_a_graph_is_alive_are_still_gathered_for_later_backwards(rank, world_size):
    def frozen_in_between(model, x):
        h = model(x)
        for p in model.blocks.parameters():
            p.requires_grad_(False)
        with torch.no_grad():
            model(x)
        loss_of(h).backward()

    pair = Pair(MLP, rank, world_size, unit_bytes=300)
    pair.step(frozen_in_between, batch(rank, 0))
    for step in range(1, 4):  # the first layer's gradient comes through the frozen ones
        pair.step(plain_backward, batch(rank, step))
    for model in (pair.model, pair.plain):
        model.requires_grad_(True)
    pair.train(*range(4, 6))


class Critic(nn.Module):
    """Two networks in one model, which take turns."""

    def __init__(self) -> None:
        super().__init__()
        self.maker, self.critic = nn.Sequential(nn.Linear(5, 7), Block(7)), nn.Sequential(Block(7), nn.Linear(7, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.critic(self.maker(x))


def _frozen_throughout(model: Any, x: torch.Tensor) -> None:
    with off(list(model.critic.parameters())):
        model(x).exp().mean().backward()


def _frozen_in_forward(model: Any, x: torch.Tensor) -> None:
    with off(list(model.critic.parameters())):
        h = model(x)
    h.exp().mean().backward()


@ranks(2)
@pytest.mark.parametrize("run", [_frozen_throughout, *seldom(_frozen_in_forward)])
def test_units_that_a_forward_found_frozen_train_like_plain(rank, world_size, run: Callable[..., None]):
    pair = Pair(Critic, rank, world_size, unit_bytes=300)
    runtime = runtime_of(pair.engine)
    pair.step(plain_backward, batch(rank, 0))
    pair.step(run, batch(rank, 1))
    reduced = {unit.name for unit in runtime.units if runtime.reductions.rounds[unit.index]}
    if run is _frozen_throughout:
        assert reduced and all("maker" in name for name in reduced), reduced
    pair.step(plain_backward, batch(rank, 2))
    assert set(runtime.reductions.rounds.values()) == {1}
    pair.check()
