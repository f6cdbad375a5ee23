"""The state of an optimizer in the hands of its user: edited, held, saved, loaded."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import torch_shard
import torch_shard.optim
from tests.compat.harness import Pair, average_grads, batch, plain_backward, same_params, whole
from tests.optim.helpers import MAKE, Odd, both, close, go, same_optimizers, trainable
from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from torch_shard.shard_tensor.tensor import ShardTensor

stateful = pytest.mark.parametrize("name", ["AdamW", *exhaustive("AdamW foreach", "AdamW fused", "NAdam", "ASGD")])


def held(optimizer):
    """References to the state of each parameter, in the order of the groups."""
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    return [(optimizer.state[p], key, value) for p in parameters for key, value in optimizer.state[p].items()]


@stateful
@ranks(2, exhaustive=(3,))
def test_state_tensors_that_the_user_holds_stay_those_of_the_optimizer(rank, world_size, name):
    pair = Pair(Odd, rank, world_size, optimizer=MAKE[name])
    go(pair, 0)
    ours, theirs = held(pair.optimizer), held(pair.plain_optimizer)
    go(pair, 1, 2)
    for (state, key, value), (plain_state, plain_key, expected) in zip(ours, theirs, strict=True):
        assert key == plain_key
        if plain_state[key] is expected:  # all of them, in torch 2.13
            assert state[key] is value, key
            close(value, expected, key)
    # And what is written through them counts.
    for _, key, value in (*ours, *theirs):
        value.mul_(0.5) if value.dim() else value.add_(key == "step")
    go(pair, 3, 2)


@stateful
@ranks(2)
def test_a_deep_copy_of_the_state_dict_is_a_snapshot_and_takes_training_back(rank, world_size, name):
    pair = Pair(Odd, rank, world_size, optimizer=MAKE[name])
    go(pair, 0, 2)
    kept = [copy.deepcopy(optimizer.state_dict()) for _, optimizer in both(pair)]
    again = [copy.deepcopy(k) for k in kept]
    weights = copy.deepcopy(pair.plain.state_dict())
    go(pair, 2, 2)
    after = copy.deepcopy(pair.plain.state_dict())
    for i, state in kept[0]["state"].items():
        for key, value in state.items():
            close(value, kept[1]["state"][i][key], key)
            assert torch.equal(whole(value), whole(again[0]["state"][i][key]))
    pair.engine.load_state_dict(weights)
    pair.plain.load_state_dict(weights)
    for (_, optimizer), state in zip(both(pair), kept, strict=True):
        optimizer.load_state_dict(state)
    go(pair, 2, 2)
    for key, value in pair.plain.state_dict().items():
        close(value, after[key], key)


@stateful
@ranks(2)
def test_each_parameter_has_counters_of_its_own(rank, world_size, name):
    pair = Pair(Odd, rank, world_size, optimizer=MAKE[name])
    go(pair, 0, 2)
    counters = [(s, key, value) for s, key, value in held(pair.optimizer) if not isinstance(value, ShardTensor)]
    assert len({value.data_ptr() for _, _, value in counters}) == len(counters) >= len(pair.optimizer.state)
    for model, optimizer in both(pair):
        optimizer.state[model.up.weight]["step"] += 7
    steps = {id(p): float(pair.optimizer.state[p]["step"]) for p in trainable(pair.model)}
    assert steps.pop(id(pair.model.up.weight)) == 9 and set(steps.values()) == {2}
    go(pair, 2, 2)  # neither they nor what depends on them become equal again
    assert float(pair.optimizer.state[pair.model.up.weight]["step"]) == 11


@stateful
@ranks(2)
def test_the_state_dict_made_whole_goes_on_in_a_plain_optimizer(rank, world_size, name):
    pair = Pair(Odd, rank, world_size, optimizer=MAKE[name])
    go(pair, 0, 2)
    state = copy.deepcopy(pair.optimizer.state_dict())
    state["state"] = {i: {k: whole(v) for k, v in entries.items()} for i, entries in state["state"].items()}
    model = Odd().double()
    model.load_state_dict({k: whole(v) for k, v in pair.model.state_dict().items()})
    optimizer = MAKE[name](model)
    optimizer.load_state_dict(state)
    for step in (2, 3):
        plain_backward(model, batch(rank, step))
        average_grads(model)
        optimizer.step()
        optimizer.zero_grad()
    go(pair, 2, 2)
    same_params(model, pair.plain)


@stateful
@ranks(2, exhaustive=(3,))
def test_an_optimizer_with_groups_that_stepped_before_sharding_goes_on(rank, world_size, name):
    torch.manual_seed(0)
    model = Odd().double()
    plain = copy.deepcopy(model)
    optimizers = [MAKE[name](m) for m in (model, plain)]

    def step(number):
        for m in (model, plain):
            plain_backward(m, batch(rank, number))
            if not isinstance(m.one, ShardTensor):
                average_grads(m)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()

    step(0)
    torch_shard.shard(model, unit_bytes=500)
    for number in (1, 2):
        step(number)
        same_optimizers(*optimizers)
    same_params(model, plain)


class Ages(torch.optim.Optimizer):
    """Declared; its state has names of its own, one of which torch gives to a number, and counts in a 0-dim tensor."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                if not state:
                    state["age"], state["mu"] = p.new_zeros(()), torch.zeros_like(p)
                state["age"] += 1
                state["mu"].mul_(0.9).add_(p.grad, alpha=0.1)
                p.add_(state["mu"], alpha=-group["lr"] / (1 - 0.9 ** state["age"].item()))


torch_shard.optim.register(Ages, "elementwise")


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.scale = nn.Linear(5, 4), nn.Parameter(torch.tensor(1.5))

    def forward(self, x):
        return self.body(x) * self.scale


@pytest.mark.parametrize("way", ["before sharding", *exhaustive("state dict", "full state", "checkpoint", "closed")])
@ranks(2)
def test_state_of_own_names_goes_on_for_a_0_dim_parameter_too(rank, world_size, way, tmp_path):
    pair = Pair(Scaled, rank, world_size, optimizer=lambda m: Ages(m.parameters()))
    for step in range(2):
        pair.step(plain_backward, batch(rank, step))
    optimizer = pair.optimizer
    if way == "before sharding":
        pair.optimizer = Ages(pair.model.parameters())
        pair.optimizer.load_state_dict(copy.deepcopy(pair.plain_optimizer.state_dict()))
    elif way == "state dict":
        pair.optimizer = Ages(pair.model.parameters())
        pair.optimizer.load_state_dict(optimizer.state_dict())
    elif way == "full state":
        pair.optimizer = Ages(pair.model.parameters())
        pair.engine.load_optim_state_dict(pair.optimizer, pair.engine.optim_state_dict(optimizer, rank0_only=False))
    elif way == "checkpoint":
        pair.engine.save(tmp_path / "saved", optimizer)
        pair.optimizer = Ages(pair.model.parameters())
        pair.engine.load(tmp_path / "saved", pair.optimizer)
    else:
        pair.engine.close(optimizer)
        pair.engine = torch_shard.shard(pair.model)
    for step in range(2, 4):
        pair.step(plain_backward, batch(rank, step))
    pair.check()
    for p, q in zip(pair.model.parameters(), pair.plain.parameters(), strict=True):
        assert type(pair.optimizer.state[p]["age"]) is torch.Tensor
        for key, value in pair.plain_optimizer.state[q].items():
            close(whole(pair.optimizer.state[p][key]), value, key)


@stateful
@ranks(2)
def test_a_model_that_is_closed_and_sharded_again_keeps_its_optimizer(rank, world_size, name):
    pair = Pair(Odd, rank, world_size, optimizer=MAKE[name])
    go(pair, 0, 2)
    pair.engine.close(pair.optimizer)
    for model, optimizer in both(pair):
        plain_backward(model, batch(rank, 2))
        average_grads(model)
        optimizer.step()
        optimizer.zero_grad()
    pair.engine = torch_shard.shard(pair.model, unit_bytes=10**6)  # other units, another cut
    go(pair, 3, 2)


@pytest.mark.parametrize("name", [*exhaustive("AdamW"), "AdamW fused", *exhaustive("NAdam")])
@ranks(2)
def test_counters_have_the_default_dtype(rank, world_size, name):
    torch.set_default_dtype(torch.float64)
    try:
        pair = Pair(Odd, rank, world_size, optimizer=MAKE[name])
        go(pair, 0, 2)
    finally:
        torch.set_default_dtype(torch.float32)
    go(pair, 2, 2)
