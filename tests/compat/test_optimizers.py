"""Optimizers and what is done with them: equal to plain training, or refused with a reason."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import torch_shard
from tests.compat.harness import (
    MLP,
    Pair,
    average_grads,
    batch,
    loss_of,
    plain_backward,
    same,
    same_params,
    train_alike,
    train_both,
)
from tests.compat.modes import as_computed
from tests.support.marks import exhaustive, quick, seldom
from tests.support.optimizers import OPTIMIZERS
from tests.support.ranks import ranks
from torch_shard.errors import NeedsGatherError
from torch_shard.shard_tensor.tensor import ShardTensor

O = torch.optim
# One of each way in which torch computes a step. All classes step in test_shard_parameters.py, without an engine.
QUICK = [
    "SGD fused",
    "Adam amsgrad",
    "AdamW for-loop",
    "AdamW tensor lr",
]


COUNTERS = {"step", "mu_product", "eta", "mu"}


def same_state(model, plain, optimizer, plain_optimizer):
    """Assert that the state agrees, and that each rank has slices of all but the counters. Collective."""
    for p, q in zip(model.parameters(), plain.parameters(), strict=True):
        ours, theirs = optimizer.state[p], plain_optimizer.state[q]
        assert ours.keys() == theirs.keys()
        for key, value in theirs.items():
            if isinstance(value, torch.Tensor):
                assert ours[key].shape == value.shape
                assert (type(ours[key]) is ShardTensor) == (key not in COUNTERS), key
                same(ours[key], value, key)


@pytest.mark.parametrize("name", quick(OPTIMIZERS, QUICK))
@ranks(2)
def test_an_optimizer_steps_as_on_the_plain_model(rank, world_size, name):
    pair = train_both(MLP, rank, world_size, optimizer=lambda m: OPTIMIZERS[name](m.parameters()), steps=4)
    same_state(pair.model, pair.plain, pair.optimizer, pair.plain_optimizer)


class WithScalar(nn.Module):
    """Has a 0-dim parameter, whose moments look like counters, and a transposed one."""

    def __init__(self):
        super().__init__()
        self.mlp, self.scale = MLP(), nn.Parameter(torch.tensor(1.5))
        self.turned = nn.Parameter(torch.randn(3, 5).t())

    def forward(self, x):
        return self.mlp(x) * self.scale + x @ self.turned


STATEFUL = ["SGD momentum", "SGD for-loop", "Adam amsgrad", "AdamW foreach", "AdamW fused", "Adagrad", "NAdam", "ASGD"]


def train_once(models, optimizers, x):
    """One step of each; the gradients of plain models are averaged."""
    for model, optimizer in zip(models, optimizers, strict=True):
        plain_backward(model, x)
        if not isinstance(next(model.parameters()), ShardTensor):
            average_grads(model)
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", quick(STATEFUL, ["SGD momentum", "Adam amsgrad", "AdamW fused", "NAdam"]))
@pytest.mark.parametrize("strategy", ["full_shard", *exhaustive("no_shard")])
@ranks(2, exhaustive=(3,))
def test_an_optimizer_that_stepped_before_sharding_goes_on(rank, world_size, name, strategy):
    torch.manual_seed(0)
    model = WithScalar().double()
    plain = as_computed(copy.deepcopy(model))
    optimizers = [OPTIMIZERS[name](m.parameters()) for m in (model, plain)]
    for step in range(20, 22):
        train_once((model, plain), optimizers, batch(rank, step))
    torch_shard.shard(model, unit_bytes=500, strategy=strategy)
    train_alike(model, plain, optimizers, rank)
    same_params(model, plain)
    same_state(model, plain, *optimizers)


@pytest.mark.parametrize("name", quick(STATEFUL, ["SGD momentum", "Adam amsgrad"]))
@ranks(2)
def test_a_plain_checkpoints_state_loads_into_the_optimizer_of_a_sharded_model(rank, world_size, name):
    torch.manual_seed(0)
    plain = WithScalar().double()
    plain_optimizer = OPTIMIZERS[name](plain.parameters())
    for step in range(20, 22):
        train_once([plain], [plain_optimizer], batch(rank, step))
    model = copy.deepcopy(plain)
    as_computed(plain)
    torch_shard.shard(model, unit_bytes=500)
    optimizer = OPTIMIZERS[name](model.parameters())
    for start in (0, 5):  # into an optimizer without state, and into one that has stepped
        checkpoint = plain_optimizer.state_dict()
        for o in (optimizer, plain_optimizer):
            o.load_state_dict(copy.deepcopy(checkpoint))
        for step in range(start, start + 2):
            train_once((model, plain), (optimizer, plain_optimizer), batch(rank, step))
    same_params(model, plain)
    same_state(model, plain, optimizer, plain_optimizer)


@ranks(2)
def test_state_of_another_shape_is_refused_and_left_as_it_is(rank, world_size):
    pair = Pair(MLP, rank, world_size, optimizer=lambda m: O.SGD(m.parameters(), lr=0.1, momentum=0.9, foreach=False))
    state = pair.optimizer.state[pair.model.inp.weight]
    state["momentum_buffer"] = odd = torch.ones(2, 7, 5, dtype=torch.float64)
    plain_backward(pair.model, batch(rank, 0))
    with pytest.raises(NeedsGatherError, match=r"inp\.weight"):
        pair.optimizer.step()
    assert state["momentum_buffer"] is odd
    pair.check()


def groups_by_ndim(model):
    decay = [p for p in model.parameters() if p.ndim >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    assert decay and rest and sum(p.numel() for p in decay) > sum(p.numel() for p in rest)
    return [{"params": decay, "weight_decay": 0.3}, {"params": rest, "weight_decay": 0.0, "lr": 0.02}]


@ranks(2, exhaustive=(3,))
def test_weight_decay_groups_chosen_after_sharding(rank, world_size):
    pair = train_both(MLP, rank, world_size, optimizer=lambda m: O.AdamW(groups_by_ndim(m), lr=0.01), steps=4)
    counts = [[len(g["params"]) for g in o.param_groups] for o in (pair.optimizer, pair.plain_optimizer)]
    assert counts[0] == counts[1]


@ranks(2)
def test_schedulers(rank, world_size):
    def build(model):
        optimizer = O.SGD(model.parameters(), lr=0.1, momentum=0.9)
        warm = O.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2)
        optimizer.scheduler = O.lr_scheduler.SequentialLR(
            optimizer, [warm, O.lr_scheduler.CosineAnnealingLR(optimizer, 4)], [2]
        )
        return optimizer

    pair = Pair(MLP, rank, world_size, optimizer=build)
    for step in range(5):
        pair.step(plain_backward, batch(rank, step))
        for optimizer in (pair.optimizer, pair.plain_optimizer):
            optimizer.scheduler.step()
        assert pair.optimizer.param_groups[0]["lr"] == pair.plain_optimizer.param_groups[0]["lr"]
    pair.check()
    plateau = O.lr_scheduler.ReduceLROnPlateau(pair.optimizer, patience=0)
    for _ in range(3):
        plateau.step(1.0)


@ranks(2)
def test_the_optimizers_own_state_dict_loads_into_another(rank, world_size):
    pair = Pair(MLP, rank, world_size, optimizer=lambda m: O.Adam(m.parameters(), lr=0.01))
    for step in range(2):
        pair.step(plain_backward, batch(rank, step))
    state = copy.deepcopy(pair.optimizer.state_dict())
    assert state["param_groups"] == pair.plain_optimizer.state_dict()["param_groups"]
    assert state["state"].keys() == pair.plain_optimizer.state_dict()["state"].keys()
    pair.optimizer = O.Adam(pair.model.parameters(), lr=0.5)
    pair.optimizer.load_state_dict(state)
    pair.train(*range(2, 4))


@ranks(2)
def test_swa_and_ema_models(rank, world_size):
    pair = Pair(MLP, rank, world_size)
    averaging = [{}, {"multi_avg_fn": O.swa_utils.get_ema_multi_avg_fn(0.9)}]
    averages = [pair.each(lambda m, options=options: O.swa_utils.AveragedModel(m, **options)) for options in averaging]
    for step in range(3):
        pair.step(plain_backward, batch(rank, step))
        for ours, theirs in averages:
            ours.update_parameters(pair.model)
            theirs.update_parameters(pair.plain)
    for ours, theirs in averages:
        same_params(ours, theirs)
        with torch.no_grad():
            same(ours(batch(rank, 9)), theirs(batch(rank, 9)))


@pytest.mark.parametrize("toggle", [True, *seldom(False)])
@ranks(2, exhaustive=(3,))
def test_a_gan_with_two_optimizers(rank, world_size, toggle):
    torch.manual_seed(0)
    plain = {
        "g": nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4)).double(),
        "d": nn.Sequential(nn.Linear(4, 6), nn.LeakyReLU(), nn.Linear(6, 1)).double(),
    }
    ours = copy.deepcopy(plain)
    for model in plain.values():
        as_computed(model)
    for model in ours.values():
        torch_shard.shard(model, unit_bytes=200)

    def train(nets, average):
        g, d = nets["g"], nets["d"]
        og, od = O.Adam(g.parameters(), lr=0.01), O.SGD(d.parameters(), lr=0.1)
        for step in range(3):
            z, real = batch(rank, step), batch(rank, 50 + step, 4, 4)
            if toggle:
                d.requires_grad_(True)
                g.requires_grad_(False)
            od.zero_grad()
            (d(g(z).detach()).exp().mean() - d(real).mean()).backward()
            average(d)
            od.step()
            if toggle:
                d.requires_grad_(False)
                g.requires_grad_(True)
            og.zero_grad()
            (-d(g(z)).mean()).backward()
            average(g)
            og.step()

    train(plain, average_grads)
    train(ours, lambda m: None)
    for name in plain:
        same_params(ours[name], plain[name])


@ranks(2, exhaustive=(3,))
def test_unfreezing_layers_and_add_param_group(rank, world_size):
    def build():
        model = MLP()
        model.inp.requires_grad_(False)
        model.blocks[0].requires_grad_(False)
        return model

    def optimizer(model):
        return O.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1, momentum=0.9)

    pair = Pair(build, rank, world_size, optimizer=optimizer)
    for step in range(2):
        pair.step(plain_backward, batch(rank, step))
    for part in ("blocks", "inp"):
        for model, opt in ((pair.model, pair.optimizer), (pair.plain, pair.plain_optimizer)):
            module = getattr(model, part)
            module = module[0] if part == "blocks" else module
            module.requires_grad_(True)
            opt.add_param_group({"params": list(module.parameters()), "lr": 0.05})
        for step in range(2, 4):
            pair.step(plain_backward, batch(rank, step))
    for model in (pair.model, pair.plain):
        model.head.requires_grad_(False)  # and freezing
        model.head.zero_grad()
    pair.train(*range(4, 6))
    assert loss_of(pair.model(batch(rank, 0))).requires_grad
