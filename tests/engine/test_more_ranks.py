"""Rows that other files run on two ranks, on three and four: cuts that fall elsewhere, ranks without a part of it all."""

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
    groups_by_name,
    loss_of,
    plain_backward,
    same_grads,
    same_params,
    train_alike,
    train_both,
)
from tests.support.marks import exhaustive
from tests.support.ranks import ranks


@pytest.mark.parametrize("strategy", ["full_shard", *exhaustive("shard_grad_op", "shard_optim", "no_shard")])
@ranks(3, exhaustive=(4,))
def test_an_optimizer_built_before_sharding_trains_like_plain(rank, world_size, strategy):
    torch.manual_seed(0)
    model = MLP().double()
    plain = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, plain)]
    torch_shard.shard(model, strategy=strategy, unit_bytes=500, timeout=20.0)
    train_alike(model, plain, optimizers, rank)
    same_params(model, plain)


@pytest.mark.exhaustive
@ranks(3)
def test_an_optimizer_that_has_stepped_before_sharding_trains_like_plain(rank, world_size):
    torch.manual_seed(0)
    model = MLP().double()
    plain = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    for m, optimizer in zip((model, plain), optimizers, strict=True):
        plain_backward(m, batch(0, 50))  # the same on all ranks
        optimizer.step()
        optimizer.zero_grad()
    torch_shard.shard(model, unit_bytes=500, timeout=20.0)
    train_alike(model, plain, optimizers, rank, steps=2)
    same_params(model, plain)


@pytest.mark.exhaustive
@ranks(3)
def test_blocks_compiled_after_sharding_train_like_plain(rank, world_size):
    pair = Pair(lambda: MLP(blocks=2), rank, world_size)
    for block in pair.model.blocks:
        block.compile(backend="aot_eager")
    for step in range(3):
        pair.step(plain_backward, batch(rank, step))
    pair.check()


@pytest.mark.exhaustive
@ranks(3)
def test_blocks_compiled_before_sharding_train_like_plain(rank, world_size):
    torch.manual_seed(0)
    plain = MLP(blocks=2).double()
    model = copy.deepcopy(plain)
    for i, block in enumerate(model.blocks):
        model.blocks[i] = torch.compile(block, backend="aot_eager")
    torch_shard.shard(model, unit_bytes=500, timeout=20.0)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    # torch.compile puts a module of its own around each block, which shows in the names.
    train_alike(model, plain, optimizers, rank, grads=False)
    ours = {name.replace("_orig_mod.", ""): p for name, p in model.named_parameters()}
    assert list(ours) == [name for name, _ in plain.named_parameters()]
    for name, p in plain.named_parameters():
        torch.testing.assert_close(ours[name].detach().full_tensor(), p.detach(), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("kind", [*exhaustive("SGD"), "AdamW"])
@ranks(3)
def test_weight_decay_groups_chosen_by_name_after_sharding_train_like_plain(rank, world_size, kind):
    make = {"SGD": torch.optim.SGD, "AdamW": torch.optim.AdamW}[kind]
    pair = train_both(MLP, rank, world_size, optimizer=lambda m: make(groups_by_name(m), lr=0.05), steps=4)
    sizes = [[len(g["params"]) for g in o.param_groups] for o in (pair.optimizer, pair.plain_optimizer)]
    assert sizes[0] == sizes[1]


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", ["full_shard", *exhaustive("shard_grad_op", "shard_optim", "no_shard")])
@ranks(3)
def test_a_gan_with_two_engines_trains_like_plain(rank, world_size, strategy):
    generator = Pair(
        lambda: nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4)),
        rank,
        world_size,
        unit_bytes=200,
        strategy=strategy,
    )
    critic = Pair(
        lambda: nn.Sequential(nn.Linear(4, 6), nn.LeakyReLU(), nn.Linear(6, 1)),
        rank,
        world_size,
        unit_bytes=200,
        strategy=strategy,
    )

    def step_of_critic(make: nn.Module, judge: nn.Module, noise: torch.Tensor, real: torch.Tensor) -> None:
        (loss_of(judge(real)) - judge(make(noise).detach()).mean()).backward()

    def step_of_generator(make: nn.Module, judge: nn.Module, noise: torch.Tensor) -> None:
        judge(make(noise)).mean().backward()

    for step in range(3):
        noise, real = batch(rank, step), batch(rank, step + 50, 4, 4)
        for model, judge in ((generator.model, critic.model), (generator.plain, critic.plain)):
            step_of_critic(model, judge, noise, real)
        average_grads(critic.plain)
        same_grads(critic.model, critic.plain)
        assert all(p.grad is None for p in generator.model.parameters())
        critic.update()
        for model, judge in ((generator.model, critic.model), (generator.plain, critic.plain)):
            step_of_generator(model, judge, noise)
        for plain in (generator.plain, critic.plain):
            average_grads(plain)
        # Backward of the generator's loss goes through the critic, too: both engines take part in one backward.
        same_grads(generator.model, generator.plain)
        same_grads(critic.model, critic.plain)
        generator.update()
        for model in (critic.model, critic.plain):
            model.zero_grad()
    generator.check()
    critic.check()
