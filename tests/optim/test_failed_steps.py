"""Steps that fail: what an exception leaves behind is what it leaves in plain torch, and training goes on."""

from __future__ import annotations

import copy
import sys
from unittest import mock

import pytest
import torch
from torch import nn

from tests.compat.harness import Pair, batch, plain_backward, same, same_params, whole
from tests.optim.helpers import MAKE, O, Odd, backward_both, both, go, mostly_adamw, same_optimizers, step_hooks
from tests.support.marks import exhaustive
from tests.support.ranks import ranks


class Stop(Exception):
    pass


def _in_a_closure(optimizer):
    def closure():
        raise Stop

    optimizer.step(closure)


def _in_a_pre_hook(optimizer):
    def hook(*args):
        raise Stop

    with step_hooks([optimizer], "instance", hook):
        optimizer.step()


def _in_a_post_hook(optimizer):
    def hook(*args):
        raise Stop

    with step_hooks([optimizer], "instance", after=hook):
        optimizer.step()


def _in_the_arithmetic(optimizer, lr=None):
    """At the group of this rate; at the first one by default."""
    function = {O.SGD: "sgd", O.AdamW: "adam"}[type(optimizer)]
    module = sys.modules[f"torch.optim.{function}"]  # torch.optim itself has no such names
    true = getattr(module, function)

    def fail(*args, **kwargs):
        if lr is None or kwargs["lr"] == lr:
            raise Stop
        return true(*args, **kwargs)

    with mock.patch.object(module, function, fail):
        optimizer.step()


def _in_the_arithmetic_of_the_second_group(optimizer):
    _in_the_arithmetic(optimizer, optimizer.param_groups[1]["lr"])


@pytest.mark.parametrize("first", [*exhaustive(0), 2])
@pytest.mark.parametrize(
    "fail", [_in_a_closure, _in_a_pre_hook, _in_a_post_hook, _in_the_arithmetic, _in_the_arithmetic_of_the_second_group]
)
@mostly_adamw
@ranks(2)
def test_an_exception_in_a_step_leaves_what_it_leaves_in_plain_torch_and_training_goes_on(
    rank, world_size, fail, first, name
):
    pair = Pair(Odd, rank, world_size, optimizer=MAKE[name])
    for step in range(first):
        go(pair, step)
    backward_both(pair, first)
    before = copy.deepcopy(pair.plain)
    for _, optimizer in both(pair):
        with pytest.raises(Stop):
            fail(optimizer)
    pair.check()
    same_optimizers(pair.optimizer, pair.plain_optimizer, failed=True)
    if fail not in (_in_a_post_hook, _in_the_arithmetic_of_the_second_group):
        same_params(pair.model, before)
    pair.update()  # with the gradients of the step that failed
    same_optimizers(pair.optimizer, pair.plain_optimizer)
    go(pair, first + 1, 2)


@pytest.mark.parametrize("strategy", ["shard_grad_op", *exhaustive("full_shard", "no_shard")])
@ranks(2)
def test_a_group_that_is_stepped_in_parts_fails_between_two_of_them(rank, world_size, strategy):
    def optimizer(model):
        return O.AdamW(model.parameters(), lr=0.1, foreach=False)

    pair = Pair(lambda: nn.Linear(5, 40), rank, world_size, optimizer=optimizer, strategy=strategy)
    go(pair, 0)
    plain_backward(pair.model, batch(rank, 1))
    before = [whole(p).clone() for p in pair.model.parameters()]
    module, calls = sys.modules["torch.optim.adam"], []  # torch.optim itself has no such names
    adam, steps = module.adam, "torch_shard.optim.elementwise.step"

    def fail(*args, **kwargs):
        calls.append(args)
        if len(calls) == 2:
            raise Stop
        return adam(*args, **kwargs)

    pieces = mock.patch(f"{steps}._PIECE", 16), mock.patch(f"{steps}._LIST", 16)
    with pieces[0], pieces[1], mock.patch.object(module, "adam", fail), pytest.raises(Stop):
        pair.optimizer.step()
    stepped = [not torch.equal(whole(p), old) for p, old in zip(pair.model.parameters(), before, strict=True)]
    counts = [pair.optimizer.state[p]["step"].item() for p in pair.model.parameters()]
    assert stepped[0]
    assert all(count == 2 for count, changed in zip(counts, stepped, strict=True) if changed)
    pair.plain.load_state_dict({name: whole(p) for name, p in pair.model.named_parameters()})
    same(*pair.each(lambda m: m(batch(rank, 2)).detach()), "output")


@mostly_adamw
@ranks(2)
def test_state_loaded_or_cleared_after_a_step_that_failed_is_what_counts(rank, world_size, name):
    pair = Pair(Odd, rank, world_size, optimizer=MAKE[name])
    go(pair, 0, 2)
    saved = [copy.deepcopy(optimizer.state_dict()) for _, optimizer in both(pair)]
    weights = copy.deepcopy(pair.plain.state_dict())
    go(pair, 2)
    for load in (True, False):
        backward_both(pair, 3)
        for _, optimizer in both(pair):
            with pytest.raises(Stop):
                _in_the_arithmetic(optimizer, optimizer.param_groups[1]["lr"])
        pair.engine.load_state_dict(weights)
        pair.plain.load_state_dict(weights)
        for (_, optimizer), state in zip(both(pair), saved, strict=True):
            if load:
                optimizer.load_state_dict(copy.deepcopy(state))
            else:
                optimizer.state.clear()
            optimizer.zero_grad()
        same_optimizers(pair.optimizer, pair.plain_optimizer)
        go(pair, 4, 2)
