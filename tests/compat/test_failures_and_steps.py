"""Optimizers whose step does more than one, fails, or is looked at from inside."""

from __future__ import annotations

import contextlib

import pytest
import torch

import torch_shard
from tests.compat.harness import MLP, Pair, average_grads, batch, plain_backward, same, train_both
from tests.support.marks import seldom
from tests.support.optimizers import SAM, Decayed
from tests.support.ranks import ranks


class Oops(Exception):
    pass


@ranks(2, exhaustive=(3,))
def test_sam_with_its_two_closures(rank, world_size):
    pair = Pair(MLP, rank, world_size, optimizer=lambda m: SAM(m.parameters(), lr=0.1, momentum=0.9))

    for step in range(3):
        x = batch(rank, step)

        def ours(x=x):
            pair.model.zero_grad()
            return plain_backward(pair.model, x)

        def theirs(x=x):
            pair.plain.zero_grad()
            loss = plain_backward(pair.plain, x)
            average_grads(pair.plain)
            return loss

        same(pair.optimizer.step(ours), pair.plain_optimizer.step(theirs), "loss")
    pair.check()


@ranks(2)
def test_an_optimizer_subclass_that_calls_super_step(rank, world_size):
    train_both(MLP, rank, world_size, optimizer=lambda m: Decayed(m.parameters(), lr=0.01), steps=4)


class Interrupted(torch.optim.SGD):
    fails = False

    def step(self, closure=None):
        if self.fails:
            raise Oops
        return super().step(closure)


def _fail(*_):
    raise Oops


@contextlib.contextmanager
def _failing(how, optimizer):
    """Let a step fail; yield its closure."""
    handle = optimizer.register_step_pre_hook(_fail) if how == "pre-hook" else None
    optimizer.fails = how == "own step"
    rate = optimizer.param_groups[0]["lr"]
    if how == "inside":
        optimizer.param_groups[0]["lr"] = "fast"
    yield _fail if how == "closure" else None
    optimizer.param_groups[0]["lr"] = rate
    optimizer.fails = False
    if handle is not None:
        handle.remove()


@pytest.mark.parametrize("how", ["closure", *seldom("pre-hook", "own step"), "inside"])
@ranks(2)
def test_an_exception_inside_the_optimizers_step(rank, world_size, how):
    pair = Pair(MLP, rank, world_size, optimizer=lambda m: Interrupted(m.parameters(), lr=0.1, momentum=0.9))
    for step in range(3):
        pair.backward(plain_backward, batch(rank, step))
        for optimizer in (pair.optimizer, pair.plain_optimizer):
            expected = (TypeError, ValueError, RuntimeError) if how == "inside" else Oops
            with _failing(how, optimizer) as closure, pytest.raises(expected):
                optimizer.step(closure)
        if how != "inside":
            pair.update()
            pair.check()
        else:  # how far a step came is the optimizer's business; the model must still train
            pair.optimizer.zero_grad()
            plain_backward(pair.model, batch(rank, step))
            pair.optimizer.step()


@ranks(2)
def test_a_step_hook_that_calls_state_dict(rank, world_size):
    seen = []

    def build(model):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

        def hook(opt, args, kwargs):
            state = opt.state_dict()
            seen.append((len(state["state"]), len(model.state_dict())))

        optimizer.register_step_pre_hook(hook)
        optimizer.register_step_post_hook(hook)
        return optimizer

    pair = Pair(MLP, rank, world_size, optimizer=build)
    pair.train(*range(3))
    n = len(list(pair.model.parameters()))
    # Both optimizers, before and after each step.
    assert seen == [(0, n), (n, n)] * 2 + [(n, n)] * 8


@ranks(2)
def test_a_step_hook_that_takes_the_full_state_dict(rank, world_size):
    torch.manual_seed(0)
    model = MLP()
    engine = torch_shard.shard(model, unit_bytes=500)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    taken = []
    optimizer.register_step_post_hook(
        lambda *_: taken.append((engine.state_dict(rank0_only=False), engine.optim_state_dict(optimizer)))
    )
    plain_backward(model, batch(rank, 0).float())
    optimizer.step()
    state, _ = taken[0]
    for name, p in model.named_parameters():
        assert torch.equal(state[name], p.detach().full_tensor())
