"""Leaves with a parameter's values (``p.detach().requires_grad_()``), and edits of ``p.data`` with what records gradients."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.compat.harness import MLP, Pair, batch, loss_of, mean_over_ranks, same
from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from torch_shard.errors import ShardError

STRATEGIES = pytest.mark.parametrize(
    "strategy", ["full_shard", *exhaustive("shard_grad_op", "shard_optim", "no_shard")]
)


def own_or_mean(grad: torch.Tensor, strategy: str) -> torch.Tensor:
    """The gradient of what is computed from parameters: the mean over the ranks, or this rank's own where nothing is sharded."""
    return grad if strategy == "no_shard" else mean_over_ranks(grad.clone())


LEAVES: dict[str, Callable[[nn.Parameter], torch.Tensor]] = {
    "detach": lambda p: p.detach().requires_grad_(),
    "data": lambda p: p.data.requires_grad_(),
    "parameter": lambda p: nn.Parameter(p.detach()),
    "clone": lambda p: p.detach().clone().requires_grad_(),
}
WAYS = [*exhaustive("clone"), "detach", *exhaustive("data", "parameter")]


def _linear(model: nn.Module, w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return F.linear(x, w).pow(2).sum()


def _sum(model: nn.Module, w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return (w * 3).pow(2).sum()


def _beside_the_parameter(model: nn.Module, w: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    return loss_of(model(x)) + (w * model.head.weight).sum() + F.linear(x[:, :1].expand(-1, w.shape[1]), w * 2).sum()


LOSSES = {"linear": _linear, "sum": _sum, "beside": _beside_the_parameter}


@STRATEGIES
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("way", WAYS)
@ranks(2, exhaustive=(3,))
def test_a_leaf_of_a_parameters_values_has_the_gradient_and_not_the_parameter(rank, world_size, way, loss, strategy):
    pair = Pair(MLP, rank, world_size, strategy=strategy)
    found, shown = [], []
    for model in (pair.model, pair.plain):
        w = LEAVES[way](model.head.weight)
        w.register_hook(lambda grad, shown=shown: shown.append(grad))
        x = batch(rank, 0) if loss == "beside" else batch(rank, 0, 4, w.shape[1])
        LOSSES[loss](model, w, x).backward()
        if loss != "beside":
            assert all(p.grad is None for p in model.parameters())
        found.append(w.grad)
    expected = own_or_mean(found[1], strategy)
    same(found[0], expected)
    same(shown[0], expected)


@STRATEGIES
@ranks(2, exhaustive=(3,))
def test_autograd_grad_differentiates_by_such_a_leaf(rank, world_size, strategy):
    pair = Pair(MLP, rank, world_size, strategy=strategy)
    found = []
    for model in (pair.model, pair.plain):
        w = model.head.weight.detach().requires_grad_()
        (grad,) = torch.autograd.grad(_linear(model, w, batch(rank, 0, 4, w.shape[1])), [w])
        found.append(grad)
    same(found[0], own_or_mean(found[1], strategy))
    pair.train(0)


class UsesALeaf(MLP):
    def forward(self, x):
        w = self.head.weight.detach().requires_grad_()
        self.kept = [w]
        return super().forward(x) + 0.1 * F.linear(x[:, :1].expand(-1, w.shape[1]), w)


@STRATEGIES
@ranks(2, exhaustive=(3,))
def test_such_a_leaf_in_a_forward_leaves_the_parameters_gradient_as_it_is(rank, world_size, strategy):
    pair = Pair(UsesALeaf, rank, world_size, strategy=strategy)
    pair.train(0, 1)
    same(pair.model.kept[0].grad, own_or_mean(pair.plain.kept[0].grad, strategy))


@ranks(2)
def test_such_a_leaf_has_its_own_gradient_inside_gathered(rank, world_size):
    pair = Pair(MLP, rank, world_size)
    p, plain = pair.model.head.weight, pair.plain.head.weight
    w, expected = p.detach().requires_grad_(), plain.detach().requires_grad_()
    x = batch(rank, 0, 4, w.shape[1])
    with pair.engine.gathered(write=True):
        p.data.mul_(2)
        _linear(pair.model, w, x).backward()
        assert p.grad is None
        mine = w.grad
    plain.data.mul_(2)
    _linear(pair.plain, expected, x).backward()
    same(mine, mean_over_ranks(expected.grad.clone()))
    pair.check()


class LoRA(nn.Module):
    """Two layers with low-rank updates of their frozen weights, which merge as in PEFT."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(5, 7), nn.Linear(7, 3)])
        self.layers.requires_grad_(False)
        self.a = nn.ParameterList([torch.randn(2, layer.in_features) for layer in self.layers])
        self.b = nn.ParameterList([torch.randn(layer.out_features, 2) for layer in self.layers])
        self.merged = False

    def merge(self, safe: bool = False) -> None:
        for layer, a, b in zip(self.layers, self.a, self.b, strict=True):
            if safe:
                weight = layer.weight.data.clone()
                weight += b @ a * 0.5
                assert torch.isfinite(weight).all()
                layer.weight.data = weight
            else:
                layer.weight.data += b @ a * 0.5
        self.merged = True

    def unmerge(self) -> None:
        for layer, a, b in zip(self.layers, self.a, self.b, strict=True):
            layer.weight.data -= b @ a * 0.5
        self.merged = False

    def forward(self, x):
        for layer, a, b in zip(self.layers, self.a, self.b, strict=True):
            update = 0 if self.merged else F.linear(F.linear(x, a), b) * 0.5
            x = (layer(x) + update).tanh()
        return x


@STRATEGIES
@pytest.mark.parametrize("safe", [False, True])
@ranks(2, exhaustive=(3,))
def test_low_rank_updates_are_merged_into_frozen_weights_and_taken_out_again(rank, world_size, safe, strategy):
    pair = Pair(LoRA, rank, world_size, strategy=strategy)
    pair.train(0)
    pair.each(lambda model: model.merge(safe))
    pair.check()
    with torch.no_grad():
        same(*pair.each(lambda model: model(batch(0, 9))))
    pair.each(lambda model: model.unmerge())
    pair.check()
    pair.train(1)


class MergesInForward(LoRA):
    def forward(self, x):
        for layer, a, b in zip(self.layers, self.a, self.b, strict=True):
            layer.weight.data += b @ a * 0.5
        self.merged = True
        x = super().forward(x)
        self.unmerge()
        return x + F.linear(x, torch.eye(x.shape[1], dtype=x.dtype)) * self.a[0].sum()


@STRATEGIES
@pytest.mark.parametrize("unit_bytes", [100, *exhaustive(1 << 20)])
@ranks(2, exhaustive=(3,))
def test_low_rank_updates_are_merged_inside_a_forward(rank, world_size, unit_bytes, strategy):
    pair = Pair(MergesInForward, rank, world_size, strategy=strategy, unit_bytes=unit_bytes)
    with torch.no_grad():
        same(*pair.each(lambda model: model(batch(0, 9))))
    same(*pair.each(lambda model: model(batch(0, 9)).detach()))
    pair.check()


EDITS: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "add_": lambda p, value: p.data.add_(value),
    "detach": lambda p, value: p.detach().mul_(value),
    "copy_": lambda p, value: p.data.copy_(value),
    "index": lambda p, value: p.data.__setitem__(0, value[0]),
    "parameter": lambda p, value: p.data.add_(p),
}


@STRATEGIES
@pytest.mark.parametrize("trains", [False, True])
@ranks(2, exhaustive=(3,))
def test_an_edit_through_an_alias_puts_no_parameter_into_a_graph(rank, world_size, trains, strategy):
    pair = Pair(MLP, rank, world_size, strategy=strategy)
    for model in (pair.model, pair.plain):
        weight = model.head.weight.requires_grad_(trains)
        for edit in EDITS.values():
            edit(weight, torch.full(weight.shape, 1.5, dtype=torch.float64, requires_grad=True))
            assert weight.is_leaf and weight.requires_grad == trains
    pair.check()
    for pair_of in (pair, copy.copy(pair)):
        pair_of.optimizer, pair_of.plain_optimizer = pair.each(lambda m: torch.optim.SGD(m.parameters(), lr=0.1))
    pair.train(0)


@pytest.mark.parametrize("copied", [False, True])
@ranks(2)
def test_computing_with_an_alias_or_copy_whose_graph_is_lost_is_an_error(rank, world_size, copied):
    pair = Pair(MLP, rank, world_size)
    alias, plain = pair.model.head.weight.data, pair.plain.head.weight.detach().clone()
    if copied:
        alias = alias.clone()
    alias.mul_(torch.full((), 2.0, dtype=torch.float64, requires_grad=True))
    alias += 0
    alias.add_(torch.zeros_like(plain))
    assert torch.isfinite(alias).all()
    assert alias.to(torch.float64) is alias
    same(alias.detach(), plain * 2)
    x = batch(rank, 0, 4, plain.shape[1])
    with torch.no_grad():
        same(F.linear(x, alias), F.linear(x, plain * 2))
    for use in (lambda: F.linear(x, alias), lambda: (alias * 2).sum()):
        with pytest.raises(
            ShardError, match=r"head\.weight .*was edited in place with a value that requires gradients"
        ):
            use()


@STRATEGIES
@ranks(2, exhaustive=(3,))
def test_aliases_of_before_an_assignment_compute_as_any_tensor_does(rank, world_size, strategy):
    pair = Pair(MLP, rank, world_size, strategy=strategy)
    found = []
    for model in (pair.model, pair.plain):
        p = model.head.weight
        old, leaf = p.data, p.detach().requires_grad_()
        p.data = p.data * 0.5
        x = batch(rank, 0, 4, p.shape[1])
        F.linear(x, leaf * old + p).pow(2).sum().backward()
        found.append((F.linear(x, old), leaf.grad, old.norm(), (old * 2).abs().max()))
        with torch.no_grad():
            found[-1] += (F.linear(x, leaf),)
    for ours, theirs in zip(*found, strict=True):
        same(ours, own_or_mean(theirs, strategy) if theirs is found[1][1] else theirs)
    pair.check()
