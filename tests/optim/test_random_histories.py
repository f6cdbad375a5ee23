"""Steps with random edits between them: whatever the order, the same as on the plain model."""

from __future__ import annotations

import copy
import random

import pytest
import torch

from tests.compat.harness import Pair, average_grads, batch, plain_backward
from tests.optim.helpers import MAKE, O, Odd, both, by_ndim, in_strides_of, same_optimizers, trainable
from tests.support.marks import exhaustive, quick
from tests.support.ranks import ranks

# Not SGD(fused=True) with momentum: torch refuses a step over parameters of which only some have a momentum buffer.
KINDS = {
    **MAKE,
    "SGD plain": lambda m: O.SGD(by_ndim(m), lr=0.1),
    "Adam amsgrad": lambda m: O.Adam(by_ndim(m), lr=0.01, amsgrad=True),
    "RMSprop": lambda m: O.RMSprop(by_ndim(m), lr=0.01, momentum=0.5, centered=True),
}


def some(model, rng):
    """A few parameters with a gradient, or nearly all."""
    found = [p for p in trainable(model) if p.grad is not None]
    return rng.sample(found, rng.choice([1, 2, len(found) - 1]) if len(found) > 2 else len(found))


def one_with_state(optimizer, rng):
    """A parameter of a group that has state, or None; in the order of the groups, which is that of the plain model too."""
    found = [p for group in optimizer.param_groups for p in group["params"] if optimizer.state.get(p)]
    return rng.choice(found) if found else None


def drop_gradients(model, optimizer, rng):
    for p in some(model, rng):
        p.grad = None


def scale_gradients(model, optimizer, rng):
    for p in some(model, rng):
        if rng.random() < 0.5:
            p.grad = p.grad * 0.5
        else:
            p.grad.mul_(0.5)


def write_gradients(model, optimizer, rng):
    for p in some(model, rng):
        p.grad = in_strides_of(p, torch.linspace(-1, 1, p.numel()).view(p.shape))


def set_options(model, optimizer, rng):
    group = rng.choice(optimizer.param_groups)
    group["lr"] *= rng.choice([0.5, 0.9, 1.1])
    group["weight_decay"] = rng.choice([0.0, 0.1])


def move_parameters(model, optimizer, rng):
    first, second = rng.sample(optimizer.param_groups, 2)
    if len(first["params"]) > 1:
        second["params"].insert(rng.randrange(len(second["params"]) + 1), first["params"].pop(0))


def edit_state(model, optimizer, rng):
    p = one_with_state(optimizer, rng)
    if p is None:
        return
    state = optimizer.state[p]
    key = rng.choice([key for key in state if key != "step" and isinstance(state[key], torch.Tensor)])
    how = rng.choice(["in place", "anew", "whole", "counter", "gone"])
    if how == "in place" or not state[key].dim() and p.dim():
        state[key].mul_(0.5)
    elif how == "anew":
        state[key] = state[key] * 0.5
    elif how == "whole":
        state[key] = in_strides_of(p, torch.linspace(0, 0.1, p.numel()).view(p.shape))
    elif how == "counter" and "step" in state:
        state["step"] += 2
    else:
        del optimizer.state[p]


def load_state(model, optimizer, rng):
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))


def edit_parameters(model, optimizer, rng):
    with torch.no_grad():
        for p in some(model, rng):
            p.mul_(0.95)


def step_twice(model, optimizer, rng):
    optimizer.step()


def fail(model, optimizer, rng):
    def closure():
        raise KeyError

    with pytest.raises(KeyError):
        optimizer.step(closure)


ACTIONS = [
    drop_gradients,
    scale_gradients,
    write_gradients,
    set_options,
    move_parameters,
    edit_state,
    load_state,
    edit_parameters,
    step_twice,
    fail,
]


@pytest.mark.parametrize("name", quick(KINDS, ["SGD", "AdamW", "AdamW fused", "ASGD"]))
@pytest.mark.parametrize("seed", [0, *exhaustive(*range(1, 6))])
@ranks(2, exhaustive=(3,))
def test_a_random_history_is_that_of_the_plain_model(rank, world_size, name, seed):
    pair = Pair(Odd, rank, world_size, optimizer=KINDS[name], unit_bytes=(500, 10**6)[seed % 2])
    rng = random.Random(f"{name} {seed}")
    history = []
    for step in range(8):
        choices = rng.sample(ACTIONS, rng.choice([0, 0, 1, 2, 3]))
        clear, left_out, own = rng.choice([True, True, False, None]), rng.random() < 0.2, rng.random()
        history.append([*(action.__name__ for action in choices), clear, left_out])
        for model, _ in both(pair):
            model.leave_out = left_out
            plain_backward(model, batch(rank, step))
        average_grads(pair.plain)
        for model, optimizer in both(pair):
            dice = random.Random(own)
            for action in choices:
                action(model, optimizer, dice)
            optimizer.step()
            # With None gradients accumulate into what has been averaged: that is the same on all ranks.
            if clear is not None:
                optimizer.zero_grad(set_to_none=clear)
        try:
            same_optimizers(pair.optimizer, pair.plain_optimizer)
        except AssertionError as error:
            raise AssertionError(f"after {history}: {error}") from error
    pair.check()
