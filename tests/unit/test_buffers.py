"""The memory of units, and what a copy of a unit has."""

from __future__ import annotations

import copy

import torch

import torch_shard
from tests.compat.harness import MLP, batch
from tests.support.inside import runtime_of
from tests.support.ranks import ranks


@ranks(2)
def test_a_buffer_is_kept_for_as_long_as_a_reduction_expects_one(rank: int) -> None:
    collectives = runtime_of(torch_shard.shard(MLP())).collectives
    collectives.expect([(4, torch.float32)] * 2)
    first = collectives.take(4, torch.float32)
    collectives.give(first)
    second = collectives.take(4, torch.float32)
    assert second.data_ptr() == first.data_ptr()
    collectives.give(second)
    assert collectives.take(4, torch.float32) is not second


@ranks(2)
def test_a_copy_computes_with_plain_parameters_of_its_own(rank: int) -> None:
    model = MLP()
    torch_shard.shard(model, unit_bytes=300)
    twin = copy.deepcopy(model)
    found = []
    for each in (model, twin):
        each.head.register_forward_pre_hook(lambda module, args: found.append(module.weight))
        with torch.no_grad():
            each(batch(rank, 0).float())
    assert not any(isinstance(weight, torch_shard.ShardTensor) for weight in found)
    assert found[0] is not found[1]


@ranks(2)
def test_modules_find_the_users_attributes_on_parameters_whatever_else_these_hold(rank: int) -> None:
    model = MLP()
    torch_shard.shard(model, unit_bytes=300)
    weight = model.head.weight
    weight.scale = 3.0
    del weight._is_param  # set by torch, and by another version perhaps not
    found = []
    model.head.register_forward_pre_hook(lambda module, args: found.append(module.weight.scale))
    model(batch(rank, 0).float())
    assert found == [3.0]
