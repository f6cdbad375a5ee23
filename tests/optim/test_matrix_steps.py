"""Optimizers of whole matrices step a sharded model as they step a plain one, on any number of ranks."""

from __future__ import annotations

import copy
import math
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torch_shard.optim
from tests.compat.harness import MLP, Pair, batch, plain_backward, same_params, whole
from tests.optim.helpers import O, Odd, both, trainable
from tests.optim.matrix_optimizers import MAKE, Shampoo, advance, gradients, maker, same_state, takes
from tests.support.marks import exhaustive, quick
from tests.support.ranks import ranks
from torch_shard.errors import DivergenceError, ShardError
from torch_shard.optim.matrix import state as matrix_state

SMALL_UNITS = pytest.mark.parametrize("part_bytes", [0, *exhaustive(4 << 20)])


def parts_of(size: int) -> Any:
    """Inside, units are exchanged together up to this size (bytes). All of those here are smaller than the usual one."""
    return mock.patch.object(matrix_state, "_SMALL", size)


@pytest.mark.parametrize("name", quick(MAKE, ["Muon", "Adafactor"]))
@SMALL_UNITS
@ranks(2, exhaustive=(3,))
def test_ten_steps(rank, world_size, name, part_bytes):
    with parts_of(part_bytes):
        ten_steps(rank, world_size, name)


def ten_steps(rank: int, world_size: int, name: str) -> None:
    # Uneven cuts, parameters of which some ranks have nothing, frozen, 0-dim and transposed ones.
    pair = Pair(Odd, rank, world_size, optimizer=maker(name), unit_bytes=300)
    rate = "lr" in pair.optimizer.defaults and pair.optimizer.defaults["lr"] is not None
    schedules = [O.lr_scheduler.StepLR(o, 2, 0.7) for o in (pair.optimizer, pair.plain_optimizer) if rate]
    for step in range(1, 11):
        if step == 5:
            for model, optimizer in both(pair):
                for p in (model.late.weight, model.late.bias):
                    p.requires_grad_(True)
                added = [nn.Parameter(torch.ones(2, 2, dtype=torch.float64))]  # not the model's
                optimizer.add_param_group({"params": added})
                added[0].grad = torch.eye(2, dtype=torch.float64)
        advance(pair, range(step, step + 1), without="column" if step in (3, 7) else "")
        for schedule in schedules:
            schedule.step()
    ours, theirs = (o.param_groups[1]["params"][0] for o in (pair.optimizer, pair.plain_optimizer))
    assert torch.equal(ours, theirs) and not torch.equal(ours, torch.ones_like(ours))
    del pair.optimizer.state[ours], pair.plain_optimizer.state[theirs]  # which the model's state dict has no name for
    for optimizer in (pair.optimizer, pair.plain_optimizer):
        del optimizer.param_groups[1]
    same_state(pair)


@pytest.mark.parametrize("name", ["Muon", *exhaustive("Adafactor", "Soap")])
@ranks(2)
def test_a_second_group_in_each_unit_added_later_leaves_state_with_its_owner(rank, world_size, name):
    def some(model):
        return MAKE[name]([p for p in model.parameters() if takes(name, p)][::2])

    pair = Pair(Odd, rank, world_size, optimizer=some, unit_bytes=1500)
    with parts_of(0):
        advance(pair, range(2))
        before = {id(p): id(own) for p, own in pair.optimizer.state.items()}
        for model, optimizer in both(pair):
            others = [p for p in model.parameters() if takes(name, p)][1::2]
            optimizer.add_param_group({"params": others, "weight_decay": 0.3})
        advance(pair, range(2, 5))
    assert before.items() <= {id(p): id(own) for p, own in pair.optimizer.state.items()}.items()
    same_state(pair)


class Blocks(nn.Module):
    """Wide enough that every rank owns something of every unit."""

    def __init__(self) -> None:
        super().__init__()
        self.inp = nn.Linear(5, 12)
        self.blocks = nn.ModuleList(nn.Linear(12, 12) for _ in range(6))
        self.head = nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inp(x)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        return self.head(x)


@ranks(2)
def test_muon_for_matrices_and_adamw_for_the_rest_of_each_unit(rank, world_size):
    pair = Pair(Odd, rank, world_size, optimizer=maker("Muon"), unit_bytes=1500)
    others = [O.AdamW([p for p in trainable(m) if not takes("Muon", p)], lr=0.01) for m in (pair.model, pair.plain)]
    for step in range(4):
        gradients(pair, step)
        for optimizer in (pair.optimizer, *others, pair.plain_optimizer):
            optimizer.step()
    same_params(pair.model, pair.plain)
    same_state(pair)


@pytest.mark.parametrize("strategy", ["no_shard", *exhaustive("shard_grad_op")])
@ranks(2)
def test_other_strategies(rank, world_size, strategy):
    pair = Pair(MLP, rank, world_size, optimizer=maker("Adafactor"), strategy=strategy)
    advance(pair, range(3))
    same_state(pair)


@ranks(2)
def test_the_same_parameter_twice_is_stepped_twice(rank, world_size):
    def make(model):
        return Shampoo([model.inp.weight, model.head.weight, model.inp.weight])

    with pytest.warns(UserWarning, match="duplicate"):
        pair = Pair(MLP, rank, world_size, optimizer=make)
    advance(pair, range(2))
    same_state(pair)


# -- ranks that differ, and steps that fail -----------------------------------------------------------------------------


@pytest.mark.exhaustive
@ranks(2)
def test_a_gradient_that_one_rank_dropped_is_a_divergence_and_changes_nothing(rank, world_size):
    pair = Pair(MLP, rank, world_size, optimizer=maker("Adafactor"))
    advance(pair, range(2))
    gradients(pair, 2)
    if rank == 1:
        pair.model.head.weight.grad = None
    with pytest.raises(DivergenceError, match=r"without a gradient: head.weight"):
        pair.optimizer.step()
    same_params(pair.model, pair.plain)
    same_state(pair)
    advance(pair, range(3, 5))  # and the engine goes on


@SMALL_UNITS
@ranks(2, exhaustive=(3,))
def test_an_exception_at_one_owner_is_an_error_on_every_rank(rank, world_size, part_bytes):
    pair = Pair(Odd, rank, world_size, optimizer=maker("Shampoo"))
    pair.optimizer.fails_at = (11, 7)
    gradients(pair, 0)
    with parts_of(part_bytes), pytest.raises((ArithmeticError, ShardError)) as caught:
        pair.optimizer.step()
    failed = int(caught.type is ArithmeticError)
    assert failed or "Shampoo.step() ended early on rank(s)" in str(caught.value)
    owners = torch.tensor([failed])
    dist.all_reduce(owners)
    assert owners.item() == 1
    # Every rank has the same parameters, and can go on.
    pair.plain = copy.deepcopy(pair.plain)
    with torch.no_grad():
        for p, q in zip(pair.model.parameters(), pair.plain.parameters(), strict=True):
            q.copy_(whole(p))
    pair.optimizer.fails_at = None
    pair.optimizer.step()
    assert all(whole(p).isfinite().all() for p in pair.model.parameters())
    assert not torch.equal(whole(pair.model.up.weight), pair.plain.up.weight)


class LooksFirst(Shampoo):
    """Goes through the groups three times: only to look, partly, and to step."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        self.norm = math.sqrt(
            sum(p.grad.square().sum() for g in self.param_groups for p in g["params"] if p.grad is not None)
        )
        for group in self.param_groups:
            self.first = group["lr"]
            break
        return super().step(closure)


torch_shard.optim.register(LooksFirst, kind="matrix")


@ranks(2)
def test_several_loops_over_the_groups(rank, world_size):
    pair = Pair(Blocks, rank, world_size, optimizer=lambda m: LooksFirst(m.parameters()))
    with parts_of(0):
        advance(pair, range(2))
    same_state(pair)


@ranks(2)
def test_a_step_of_unreduced_gradients_is_refused_on_all_ranks(rank, world_size):
    pair = Pair(MLP, rank, world_size, optimizer=maker("Muon"))
    with pair.engine.no_sync():
        plain_backward(pair.model, batch(rank, 0))
    with pytest.raises(ShardError, match="not reduced"):
        pair.optimizer.step()
    same_params(pair.model, pair.plain)


class Mixed(nn.Module):
    """Two dtypes in a unit; odd numbers of the smaller one's elements go before the larger one's."""

    def __init__(self) -> None:
        super().__init__()
        self.low = nn.ParameterList(nn.Parameter(torch.randn(n, 3, dtype=torch.bfloat16)) for n in (5, 7, 3))
        self.high = nn.ParameterList(nn.Parameter(torch.randn(3, n, dtype=torch.float64)) for n in (5, 1, 7))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(
            (x[:, :3] @ a).sum() + (x[:, :3] @ b.T.double()).pow(2).sum()
            for a, b in zip(self.high, self.low, strict=True)
        )


@pytest.mark.parametrize("name", ["Muon", *exhaustive("transformers relative")])
@ranks(2, exhaustive=(3,))
def test_parameters_of_two_dtypes_in_one_unit(rank, world_size, name):
    pair = Pair(Mixed, rank, world_size, optimizer=maker(name), double=False, unit_bytes=1 << 20)
    assert len(pair.engine.units) == 1
    advance(pair, range(3))
    same_state(pair)


@pytest.mark.exhaustive
@ranks(2)
def test_a_copy_of_model_and_optimizer_goes_on_by_itself(rank, world_size):
    pair = Pair(Odd, rank, world_size, optimizer=maker("Shampoo"))
    advance(pair, range(2))
    twin = copy.copy(pair)
    twin.model, twin.optimizer, twin.plain, twin.plain_optimizer, twin.engine = copy.deepcopy(
        (pair.model, pair.optimizer, pair.plain, pair.plain_optimizer, pair.engine)
    )
    same_state(twin)
    advance(twin, range(2, 4))
    same_state(twin)
    advance(pair, range(4, 6))
    same_state(pair)
