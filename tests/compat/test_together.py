"""Backwards through several sharded models."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import torch_shard
from tests.compat.harness import average_grads, batch, loss_of, same, same_grads
from tests.compat.modes import as_computed
from tests.support.ranks import ranks
from torch_shard.errors import DivergenceError


class Shift(nn.Module):
    """Backward needs nothing of it, so only reductions are sent for it."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(5))

    def forward(self, x):
        return x * x + self.weight


class Part(nn.Module):
    """Two layers of one size; the first one's use can be left out of the graph."""

    def __init__(self):
        super().__init__()
        self.a, self.b = Shift(), Shift()

    def forward(self, x, detached=False):
        y = self.a(x)
        return self.b(x + (y.detach() if detached else y))


def _two(rank):
    torch.manual_seed(0)
    plain = [Part().double() for _ in range(2)]
    sharded = copy.deepcopy(plain)
    for model in plain:
        as_computed(model)
    for model in sharded:
        torch_shard.shard(model, unit_bytes=20, timeout=10.0)
    return plain, sharded


def _same_gradients(plain, sharded):
    for ours, theirs in zip(sharded, plain, strict=True):
        average_grads(theirs)
        same_grads(ours, theirs)


@ranks(2, 3)
def test_one_loss_through_two_models_trains_like_plain(rank, world_size):
    plain, sharded = _two(rank)
    for step in range(3):
        for first, second in (plain, sharded):
            loss_of(second(first(batch(rank, step)))).backward()
        _same_gradients(plain, sharded)


@pytest.mark.parametrize("everywhere", [True, False])
@ranks(2)
def test_parts_of_two_models_that_ranks_leave_out_of_a_loss_are_an_error(rank, world_size, everywhere):
    """One rank leaves a part out, so that it comes to the models in another order; or each rank another one."""
    _, (first, second) = _two(rank)
    with pytest.raises(DivergenceError, match="mixed the collectives of several models"):
        for step in range(3):
            middle = first(batch(rank, step), detached=everywhere and rank == 0)
            loss_of(second(middle, detached=rank == 1)).backward()


class Broken(torch.autograd.Function):
    """Raises in backward, on some ranks."""

    @staticmethod
    def forward(ctx, x, fails):
        ctx.fails = fails
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        if ctx.fails:
            raise ValueError("a backward of the user's")
        return grad, None


@ranks(2)
def test_a_backward_through_two_models_that_fails_on_all_ranks_leaves_no_gradient(rank, world_size):
    plain, sharded = _two(rank)
    for broken in (True, False):
        for model in (*plain, *sharded):
            model.zero_grad()
        for first, second in (plain, sharded):
            loss = loss_of(second(Broken.apply(first(batch(rank, 0)), broken)))
            if broken:
                with pytest.raises(ValueError, match="of the user's"):
                    loss.backward()
            else:
                loss.backward()
        if broken:
            assert all(p.grad is None for model in sharded for p in model.parameters())
    _same_gradients(plain, sharded)


@pytest.mark.parametrize("inside", [0, 1])
@ranks(2)
def test_a_model_inside_a_reentrant_checkpoint_beside_another_one_trains_like_plain(rank, world_size, inside):
    plain, sharded = _two(rank)
    for step in range(3):
        for pair in (plain, sharded):
            x = batch(rank, step).requires_grad_()  # else the checkpoint would record nothing
            for i, model in enumerate(pair):
                x = checkpoint(model, x, use_reentrant=True) if i == inside else model(x)
            loss_of(x).backward()
        _same_gradients(plain, sharded)


@ranks(2)
def test_two_models_stepped_during_one_backward_train_like_plain(rank, world_size):
    plain, sharded = _two(rank)
    ours, theirs = ([torch.optim.SGD(model.parameters(), lr=0.01) for model in pair] for pair in (sharded, plain))
    for model, optimizer in zip(sharded, ours, strict=True):
        torch_shard.engine_of(model).step_in_backward(optimizer)
    for step in range(3):
        for first, second in (plain, sharded):
            loss_of(second(first(batch(rank, step)).tanh()).tanh()).backward()
        for model in plain:
            average_grads(model)
        for optimizer in (*ours, *theirs):
            optimizer.step()
            optimizer.zero_grad()
    for model, other in zip(sharded, plain, strict=True):
        for p, q in zip(model.parameters(), other.parameters(), strict=True):
            same(p.detach().full_tensor(), q.detach())
