"""Optimizers step the same parameters on all ranks, or the ranks find that they do not: a rank steps its own shards only."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torch_shard
from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from torch_shard.errors import DivergenceError

SGD = torch.optim.SGD


def made(**config):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 3))
    return model, torch_shard.shard(model, **config)


def backward(model, seed=0):
    torch.manual_seed(seed)
    model(torch.randn(5, 4)).square().mean().backward()


def steps(model, *optimizers, count=2):
    """Trains with optimizers that step one after another, and compares with plain training. Collective."""
    plain, _ = made(strategy="no_shard")
    names = {id(p): name for name, p in model.named_parameters()}
    own = dict(plain.named_parameters())
    twins = [SGD([own[names[id(p)]] for p in opt.param_groups[0]["params"]], lr=0.1) for opt in optimizers]
    for number in range(count):
        for net, each in (
            (model, optimizers),
            (plain, sorted(twins, key=lambda opt: len(opt.param_groups[0]["params"]))),
        ):
            backward(net, number)
            for optimizer in each:
                optimizer.step()
            net.zero_grad()
    found = {name: p.full_tensor() for name, p in model.named_parameters()}
    torch.testing.assert_close(found, {name: p.detach() for name, p in plain.named_parameters()})


@pytest.mark.parametrize("strategy", ["full_shard", *exhaustive("shard_optim", "shard_grad_op")])
@ranks(2)
def test_a_rank_whose_optimizer_lists_other_parameters_is_found_at_the_next_forward(rank, world_size, strategy):
    model, _ = made(strategy=strategy)
    optimizer = SGD(model[2].parameters() if rank == 0 else model.parameters(), lr=0.1)
    backward(model)
    optimizer.step()
    words = (
        r"(?s)the same changes.*rank 0: .* 2 parameters from 2.bias to 2.w.*rank 1: .* 4 parameters from 0.bias to 2.w"
    )
    with pytest.raises(DivergenceError, match=words):
        backward(model)


@ranks(2)
def test_a_group_that_one_rank_adds_later_is_found(rank, world_size):
    model, _ = made()
    optimizer = SGD(model[2].parameters(), lr=0.1)
    backward(model)
    optimizer.step()
    backward(model)
    if rank == 0:
        optimizer.add_param_group({"params": model[0].parameters()})
    optimizer.step()
    with pytest.raises(DivergenceError, match="the same changes"):
        backward(model)


@ranks(2)
def test_after_a_load_on_all_ranks_an_old_optimizer_steps_beside_a_new_one(rank, world_size):
    model, engine = made()
    optimizer = SGD(model[2].parameters() if rank == 0 else model.parameters(), lr=0.1)
    kept = {name: p.full_tensor() for name, p in model.named_parameters()}
    backward(model)
    optimizer.step()
    with pytest.raises(DivergenceError):
        backward(model)
    engine.load_state_dict(kept)
    if rank == 0:
        optimizer = SGD(model.parameters(), lr=0.1)
    backward(model)
    optimizer.step()
    backward(model)


@ranks(2)
def test_optimizers_that_ranks_step_in_another_order_are_right(rank, world_size):
    model, _ = made()
    optimizers = [SGD(model[number].parameters(), lr=0.1) for number in (0, 2)]
    steps(model, *(optimizers if rank == 0 else optimizers[::-1]))


@ranks(2)
def test_an_optimizer_that_one_rank_makes_anew_or_lists_in_another_order_is_right(rank, world_size):
    model, _ = made()
    params = list(model.parameters())
    optimizer = SGD(params if rank == 0 else params[::-1], lr=0.1)
    steps(model, optimizer)
    backward(model)
    if rank == 0:
        optimizer = SGD(params, lr=0.1)
    optimizer.step()
    backward(model)


@ranks(2)
def test_optimizers_that_step_in_turns_are_right(rank, world_size):
    model, _ = made()
    optimizers = [SGD(model[number].parameters(), lr=0.1) for number in (0, 2)]
    for number in range(4):
        backward(model, number)
        optimizers[number % 2].step()
        model.zero_grad()
        with torch.no_grad():
            model(torch.ones(1, 4))


@ranks(2)
def test_where_each_rank_has_full_parameters_it_may_step_any_of_them(rank, world_size):
    model, _ = made(strategy="no_shard")
    optimizer = SGD(model[2 * rank].parameters(), lr=0.1)
    backward(model)
    optimizer.step()
    backward(model)
