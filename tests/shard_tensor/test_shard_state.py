"""What a sharded tensor is to the engine lies in one attribute: all others are the user's."""

from __future__ import annotations

import copy

import pytest
import torch

import torch_shard
from tests.compat.harness import MLP, Pair, batch, plain_backward
from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from torch_shard.shard_tensor.tensor import ShardTensor

PARAMETER, OTHERS = {"_shard_state", "_is_param"}, {"_shard_state"}


def adam(model: torch.nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.1)


@pytest.mark.parametrize("offload", [None, *exhaustive(torch_shard.Offload())])
@pytest.mark.parametrize("strategy", ["full_shard", *exhaustive("shard_grad_op", "no_shard")])
@ranks(2)
def test_sharded_tensors_have_one_attribute_of_the_engines(strategy, offload, rank: int, world_size: int) -> None:
    pair = Pair(MLP, rank, world_size, optimizer=adam, strategy=strategy, offload=offload)
    model, optimizer = pair.model, pair.optimizer
    for step in range(2):
        with pair.engine.no_sync():
            plain_backward(model, batch(rank, step))
        assert all(set(p.grad.__dict__) == OTHERS for p in model.parameters())
        plain_backward(model, batch(rank, step))
        assert all(set(p.grad.__dict__) == OTHERS for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    for each in (model, copy.deepcopy(model)):
        assert all(set(p.__dict__) == PARAMETER for p in each.parameters())
        assert all(set(p.detach().__dict__) | set((p * 2).__dict__) == OTHERS for p in each.parameters())
    for entries in optimizer.state.values():
        sharded = [value for value in entries.values() if isinstance(value, ShardTensor)]
        assert len(sharded) == 2 and all(set(value.__dict__) == OTHERS for value in sharded)


@pytest.mark.parametrize("offload", [None, *exhaustive(torch_shard.Offload())])
@ranks(2)
def test_the_users_attributes_go_to_the_gathered_parameter_and_back(offload, rank: int, world_size: int) -> None:
    pair = Pair(MLP, rank, world_size, optimizer=adam, offload=offload)
    model, seen = pair.model, []
    model.head.weight.note = "mine"

    def look(module: torch.nn.Module, args: object) -> None:
        seen.append((module.weight.note, hasattr(module.bias, "note")))
        module.weight.other = "set in forward"

    model.head.register_forward_pre_hook(look)
    for step in range(2):
        pair.step(plain_backward, batch(rank, step))
        assert seen.pop() == ("mine", False)
        assert model.head.weight.other == "set in forward"
        assert set(model.head.weight.__dict__) == PARAMETER | {"note", "other"}
    pair.engine.close()
    assert model.head.weight.__dict__ == {"note": "mine", "other": "set in forward"}


@ranks(1)
def test_what_is_known_of_a_gradient_is_copied_with_it(rank: int) -> None:
    model = MLP()
    torch_shard.shard(model)
    weight = model.head.weight
    result = (weight.detach() * 2).detach()
    with torch.no_grad():
        derived = weight * 2
    gradient = ShardTensor(weight.to_local().clone(), weight._spec)
    gradient.note = ["mine"]
    for tensor in (result, derived, gradient):
        other = copy.deepcopy(tensor)
        assert type(other) is type(tensor) and torch.equal(other.to_local(), tensor.to_local())
        assert other.to_local().data_ptr() != tensor.to_local().data_ptr()
        assert (other._shard_state.origin is None) == (tensor._shard_state.origin is None)
    assert derived._shard_state.origin is not None
    other = copy.deepcopy(gradient)
    assert other.note == ["mine"] and other.note is not gradient.note
    names, spec = gradient.__tensor_flatten__()
    inner = {name: getattr(gradient, name) for name in names}
    flattened = ShardTensor.__tensor_unflatten__(inner, spec, gradient.shape, gradient.stride())
    assert torch.equal(flattened.full_tensor(), gradient.full_tensor())
    with pytest.raises(AttributeError):
        weight.__tensor_flatten__()
