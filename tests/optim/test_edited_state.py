"""The state of an optimizer in the hands of its user: edited, held, saved, loaded."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import torch_shard
import torch_shard.optim
from tests.compat.harness import Pair, average_grads, batch, plain_backward, whole
from tests.optim.helpers import COUNTERS, MAKE, Descent, O, Odd, both, close, go
from tests.support.marks import exhaustive, quick
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


class Ages(Descent):
    """Declared; its state has names of its own, one of which torch gives to a number, and counts in a 0-dim tensor."""

    def update(self, p, group):
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


WAYS = ["before sharding", "state dict", "full state", "checkpoint", "closed"]


@pytest.mark.parametrize("way", quick(WAYS, ["before sharding", "closed"]))
@pytest.mark.parametrize("make", [Ages, O.AdamW, *exhaustive(O.NAdam, O.ASGD)])
@ranks(2)
def test_state_goes_on_whichever_way_it_comes_for_a_0_dim_parameter_too(rank, world_size, make, way, tmp_path):
    pair = Pair(Scaled, rank, world_size, optimizer=lambda m: make(m.parameters(), lr=0.1))
    for step in range(2):
        pair.step(plain_backward, batch(rank, step))
    optimizer = pair.optimizer
    if way != "closed":
        pair.optimizer = make(pair.model.parameters(), lr=0.1)
    if way in ("before sharding", "state dict"):
        plain = pair.plain_optimizer.state_dict()
        pair.optimizer.load_state_dict(copy.deepcopy(plain if way == "before sharding" else optimizer.state_dict()))
        pair.plain_optimizer.load_state_dict(copy.deepcopy(plain))  # torch converts what it loads, most counters too
    elif way == "full state":
        pair.engine.load_optim_state_dict(pair.optimizer, pair.engine.optim_state_dict(optimizer, rank0_only=False))
    elif way == "checkpoint":
        pair.engine.save(tmp_path / "saved", optimizer)
        pair.engine.load(tmp_path / "saved", pair.optimizer)
    else:
        pair.engine.close(optimizer)
        for model, each in both(pair):
            plain_backward(model, batch(rank, 2))
            average_grads(model)
            each.step()
            each.zero_grad()
        pair.engine = torch_shard.shard(pair.model)  # other units, another cut
    for step in range(3, 5):
        pair.step(plain_backward, batch(rank, step))
    pair.check()
    for p, q in zip(pair.model.parameters(), pair.plain.parameters(), strict=True):
        counters = {"age"} if make is Ages else COUNTERS
        for key, value in pair.plain_optimizer.state[q].items():
            assert isinstance(pair.optimizer.state[p][key], ShardTensor) == (key not in counters)
            close(whole(pair.optimizer.state[p][key]), value, key)


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


@ranks(2)
def test_state_that_the_user_keeps_under_a_number_stays_in_the_state_dict(rank, world_size):
    """Also under one that is no parameter's."""
    pair = Pair(Odd, rank, world_size, optimizer=MAKE["AdamW"])
    go(pair, 0)
    for _, optimizer in both(pair):
        optimizer.state[99] = {"seen": 3}
        assert optimizer.state_dict()["state"][99] == {"seen": 3}
