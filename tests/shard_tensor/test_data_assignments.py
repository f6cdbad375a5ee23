"""Assignments to ``.data``: other tensors over a parameter's memory keep their values, as in plain torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.compat.harness import MLP, Pair, batch, loss_of, same, train_both
from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from torch_shard import Precision
from torch_shard.errors import NeedsGatherError

STRATEGIES = pytest.mark.parametrize(
    "strategy", ["full_shard", *exhaustive("shard_grad_op", "shard_optim", "no_shard")]
)


class Average:
    """The running average that many training scripts have in them."""

    def __init__(self, model: nn.Module) -> None:
        self.shadow = {n: p.data.clone() for n, p in model.named_parameters()}
        self.backup: dict[str, Any] = {}

    def update(self, model: nn.Module) -> None:
        for n, p in model.named_parameters():
            self.shadow[n] = 0.9 * self.shadow[n] + 0.1 * p.data

    def apply(self, model: nn.Module) -> None:
        for n, p in model.named_parameters():
            self.backup[n] = p.data
            p.data = self.shadow[n]

    def restore(self, model: nn.Module) -> None:
        for n, p in model.named_parameters():
            p.data = self.backup[n]
        self.backup = {}


class DetachedAverage(Average):
    def apply(self, model: nn.Module) -> None:
        for n, p in model.named_parameters():
            self.backup[n] = p.detach()
            p.data = self.shadow[n]


@STRATEGIES
@pytest.mark.parametrize("kind", [Average, *exhaustive(DetachedAverage)])
@ranks(2, exhaustive=(3,))
def test_an_average_is_put_into_the_model_and_taken_out_again(rank, world_size, kind, strategy):
    pair = Pair(MLP, rank, world_size, strategy=strategy)
    averages = pair.each(kind)
    for turn in range(2):
        pair.train(2 * turn, 2 * turn + 1)
        for average, model in zip(averages, (pair.model, pair.plain), strict=True):
            average.update(model)
            average.apply(model)
        pair.check()
        with torch.no_grad():
            same(*pair.each(lambda model: model(batch(0, 9))))
        for average, model in zip(averages, (pair.model, pair.plain), strict=True):
            average.restore(model)
        pair.check()
    pair.train(8)


@STRATEGIES
@ranks(2, exhaustive=(3,))
def test_two_parameters_swap_their_values(rank, world_size, strategy):
    pair = Pair(
        lambda: nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)), rank, world_size, unit_bytes=100, strategy=strategy
    )
    for a, b in (model.children() for model in (pair.model, pair.plain)):
        a.weight.data, b.weight.data = b.weight.data, a.weight.data
    pair.check()
    pair.train(0, 1)


def _edits_by_alias(p: nn.Parameter) -> list[torch.Tensor]:
    alias = p.data
    alias.mul_(2)
    return [alias]


def _edits_the_parameter_after(p: nn.Parameter) -> list[torch.Tensor]:
    alias = p.data
    p.data = p.data * 0.5
    with torch.no_grad():
        p.add_(1)
    return [alias]


def _edits_an_old_alias(p: nn.Parameter) -> list[torch.Tensor]:
    alias, other = p.data, p.data
    p.data = p.data * 0.5
    alias.add_(1)
    return [alias, other]


def _edits_an_old_detached_alias(p: nn.Parameter) -> list[torch.Tensor]:
    alias, other = p.detach(), p.detach()
    p.data = p.data * 0.5
    alias.add_(1)
    return [alias, other, alias.detach()]


def _assigns_equal_values(p: nn.Parameter) -> list[torch.Tensor]:
    alias = p.data
    p.data = p.data.clone()
    alias.add_(1)
    return [alias]


def _edits_an_alias_that_was_put_back(p: nn.Parameter) -> list[torch.Tensor]:
    alias, backup = p.data, p.data
    p.data = p.data * 0.5
    p.data = backup
    alias.add_(1)
    return [alias, backup]


def _assigns_to_an_alias(p: nn.Parameter) -> list[torch.Tensor]:
    alias = p.detach()
    alias.data = p.data * 0.5
    alias.add_(1)
    return [alias]


def _edits_and_assigns_the_alias(p: nn.Parameter) -> list[torch.Tensor]:
    p.data *= 3
    alias = p.data
    p.data = alias
    with torch.no_grad():
        p.add_(1)
    return [alias]


PROGRAMS: list[Callable[[Any], list[torch.Tensor]]] = [
    _edits_by_alias, _edits_the_parameter_after, _edits_an_old_alias, _edits_an_old_detached_alias, _assigns_equal_values,
    _edits_an_alias_that_was_put_back, _assigns_to_an_alias, _edits_and_assigns_the_alias,
]  # fmt: skip


@STRATEGIES
@pytest.mark.parametrize("gathered", [False, *exhaustive(True)])
@ranks(2, exhaustive=(3,))
def test_aliases_share_the_values_of_a_parameter_until_it_is_assigned_others(rank, world_size, gathered, strategy):
    pair = Pair(MLP, rank, world_size, strategy=strategy)
    for program in PROGRAMS:
        params = [model.blocks[1].up.weight for model in (pair.model, pair.plain)]
        if gathered:
            with pair.engine.gathered(write=True):
                found = list(map(program, params))
                for ours, theirs in zip(*found, strict=True):
                    same(ours, theirs, program.__name__)
        else:
            found = list(map(program, params))
            for ours, theirs in zip(*found, strict=True):
                same(ours, theirs, program.__name__)
        pair.check()
    pair.train(0)


@STRATEGIES
@ranks(2, exhaustive=(3,))
def test_values_are_put_aside_and_put_back_inside_gathered(rank, world_size, strategy):
    pair = Pair(
        lambda: nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5)), rank, world_size, unit_bytes=100, strategy=strategy
    )
    params = list(pair.model.parameters())
    before = params[1].data
    with pair.engine.gathered(write=True):
        for found in (params, list(pair.plain.parameters())):
            backup = [p.data for p in found]
            for p in found:
                p.data = p.data + 1
            for p, value in zip(found, backup, strict=True):
                p.data = value
            found[0].data, found[2].data = found[2].data, found[0].data
            found[1].data = found[1].data * 2
        for model in (pair.model, pair.plain):
            backup = [p.data for p in model.parameters()]
            for p in model.parameters():
                p.data = p.data + 1
            for p, value in zip(model.parameters(), backup, strict=True):
                p.data = value
            model[0].weight.data, model[1].weight.data = model[1].weight.data, model[0].weight.data
    pair.check()
    same(before * 2, pair.plain[0].bias)
    pair.train(0)


@ranks(2)
def test_a_sharded_value_is_refused_where_one_rank_alone_has_the_parameters(rank, world_size):
    pair = Pair(MLP, rank, world_size)
    param = pair.model.head.weight
    average = param.detach() * 2
    with pair.engine.gathered(ranks=0, write=True):
        if rank == 0:
            with pytest.raises(NeedsGatherError, match=r"head\.weight .*full_tensor"):
                param.data = average
    pair.check()
    full = average.full_tensor()
    with pair.engine.gathered(ranks=0, write=True):
        if rank == 0:
            param.data = full
    pair.plain.head.weight.data.mul_(2)
    pair.check()


class Binarised(nn.Linear):
    def forward(self, x):
        old = self.weight.data if self.how == "data" else self.weight.detach()
        self.weight.data = old.sign()
        result = super().forward(x)
        self.weight.data = old
        return result


class BinarisesAnother(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(5, 6), nn.Linear(6, 3)

    def forward(self, x):
        old = self.b.weight.data
        self.b.weight.data = old.sign()
        result = self.b(self.a(x))
        self.b.weight.data = old
        return result


@ranks(2)
def test_a_backward_fails_whose_values_were_replaced_where_nothing_is_gathered(rank, world_size):
    pair = Pair(lambda: nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 3)), rank, world_size, strategy="no_shard")
    loss = loss_of(pair.model(batch(rank, 0)))
    pair.model[1].weight.data = pair.model[1].weight.data * 0.5
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


class Swaps(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(5, 5)), nn.Parameter(torch.randn(5, 5))

    def forward(self, x):
        self.a.data, self.b.data = self.b.data, self.a.data
        return (x @ self.a).tanh() @ self.b


def _binarised(how: str) -> nn.Module:
    model = nn.Sequential(Binarised(5, 6), nn.Linear(6, 4), Binarised(4, 3))
    for layer in (model[0], model[2]):
        layer.how = how
    return model


BUILDS = {
    "data": lambda: _binarised("data"),
    "detach": lambda: _binarised("detach"),
    "swaps": lambda: nn.Sequential(nn.Linear(5, 5), Swaps()),
}


@STRATEGIES
@pytest.mark.parametrize("unit_bytes", [100, *exhaustive(1 << 20)])
@pytest.mark.parametrize("how", BUILDS)
@ranks(2, exhaustive=(3,))
def test_a_forward_computes_with_other_values_and_puts_the_old_ones_back(rank, world_size, how, unit_bytes, strategy):
    train_both(BUILDS[how], rank, world_size, unit_bytes=unit_bytes, strategy=strategy, steps=4)


@pytest.mark.parametrize("strategy", ["full_shard", *exhaustive("shard_grad_op", "shard_optim")])
@ranks(2, exhaustive=(3,))
def test_a_forward_lets_another_module_compute_with_other_values(rank, world_size, strategy):
    train_both(BinarisesAnother, rank, world_size, unit_bytes=100, strategy=strategy, steps=4)


@ranks(2)
def test_under_mixed_precision_a_forward_puts_the_stored_values_back(rank, world_size):
    precision = Precision(param_dtype=torch.float32)
    pair = Pair(BinarisesAnother, rank, world_size, unit_bytes=100, precision=precision)
    loss_of(pair.model(batch(rank, 0, 4, 5))).backward()
    assert pair.model.b.weight.grad is not None
    pair.check()  # in float64


@ranks(2)
def test_values_that_a_forward_assigns_leave_earlier_aliases_as_they_are(rank, world_size):
    class Halves(nn.Linear):
        def forward(self, x):
            self.weight.data = self.weight.data * 0.5
            return super().forward(x)

    pair = Pair(lambda: nn.Sequential(Halves(5, 6), nn.Linear(6, 3)), rank, world_size, unit_bytes=100)
    for model in (pair.model, pair.plain):
        backup = [p.data for p in model.parameters()]
        loss_of(model(batch(rank, 0)))
        for p, value in zip(model.parameters(), backup, strict=True):
            p.data = value
    pair.check()
    pair.train(0)
