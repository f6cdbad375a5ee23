"""What a user changes between optimizer steps: groups, hyperparameters, gradients, parameters."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.compat.harness import Pair, average_grads, batch, plain_backward, whole
from tests.optim.helpers import (
    MAKE,
    O,
    Odd,
    both,
    close,
    copy_grads,
    go,
    in_strides_of,
    mostly_adamw,
    same_optimizers,
    trainable,
)
from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from torch_shard.errors import ConfigError

# -- groups and optimizers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unit_bytes", [500, *exhaustive(10**6)], ids=["several units", "one unit"])
@ranks(2, exhaustive=(3,))
def test_several_optimizers_over_disjoint_parts_of_a_unit_step_in_turn(rank, world_size, unit_bytes):
    def optimizers(model):
        parameters = trainable(model)
        return [
            O.AdamW(parameters[::3], lr=0.01),
            O.SGD(parameters[1::3], lr=0.1, momentum=0.9),
            O.AdamW(parameters[2::3], lr=0.02, fused=True),
        ]

    pair = Pair(Odd, rank, world_size, optimizer=optimizers, unit_bytes=unit_bytes)
    for step in range(6):
        for model, chosen in both(pair):
            plain_backward(model, batch(rank, step))
            if model is pair.plain:
                average_grads(model)
            for i, optimizer in enumerate(chosen):
                if step % (i + 1) == 0:
                    optimizer.step()
            model.zero_grad()
        pair.check()
        for ours, theirs in zip(pair.optimizer, pair.plain_optimizer, strict=True):
            same_optimizers(ours, theirs)


@ranks(2)
def test_a_parameter_that_is_listed_twice_is_refused(rank, world_size):
    pair = Pair(Odd, rank, world_size, optimizer=lambda model: O.SGD(trainable(model), lr=0.1, momentum=0.9))
    go(pair, 0)
    pair.optimizer.param_groups.append({**pair.optimizer.param_groups[0], "params": [pair.model.up.weight]})
    plain_backward(pair.model, batch(rank, 1))
    with pytest.raises(ConfigError, match=r"up\.weight more than once"):
        pair.optimizer.step()
    pair.check()


class TwoDtypes(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(5, 7).float(), nn.Linear(7, 3).double()
        self.low = nn.Parameter(torch.randn(3).bfloat16())

    def forward(self, x):
        return self.second(torch.tanh(self.first(x.float())).double()) * self.low.double()


@pytest.mark.parametrize(
    "name", [*exhaustive("SGD", "AdamW"), "AdamW foreach", *exhaustive("AdamW fused", "NAdam", "ASGD")]
)
@ranks(2, exhaustive=(3,))
def test_one_group_of_several_dtypes_beside_parameters_that_are_not_sharded(rank, world_size, name):
    outside = [nn.Parameter(torch.linspace(1, 2, 3, dtype=torch.float64)) for _ in range(2)]

    def optimizer(model):
        made = MAKE[name](model)
        made.param_groups[1]["params"].append(outside.pop())
        return made

    pair = Pair(TwoDtypes, rank, world_size, optimizer=optimizer, double=False, unit_bytes=10**6)
    plain_ones = [optimizer.param_groups[1]["params"][-1] for _, optimizer in both(pair)]
    for step in range(4):
        for model, optimizer in both(pair):
            optimizer.zero_grad()
            plain_backward(model, batch(rank, step))
        copy_grads(pair.model, pair.plain)
        for (_, optimizer), p in zip(both(pair), plain_ones, strict=True):
            p.grad = torch.full_like(p, 0.1 * step)
            optimizer.step()
    # bfloat16 has eight bits: parameters agree to the last one or two of them.
    for p, q in zip(pair.model.parameters(), pair.plain.parameters(), strict=True):
        tolerance = {torch.float64: 1e-9, torch.float32: 1e-6, torch.bfloat16: 1e-2}[q.dtype]
        close(whole(p), q, p._spec.name, tolerance, tolerance)
        for key, value in pair.plain_optimizer.state[q].items():
            assert (
                pair.optimizer.state[p][key].dtype == value.dtype and pair.optimizer.state[p][key].shape == value.shape
            )
    close(*plain_ones, "a parameter outside the model")
    assert type(pair.optimizer.state[plain_ones[0]].get("exp_avg", plain_ones[0].data)) is torch.Tensor


def _step_in_backward(model, make):
    """As it is done to hold one gradient at a time: an optimizer for each parameter, which steps as soon as it can."""
    optimizers = {p: make([p]) for p in trainable(model)}

    def hook(p):
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in optimizers:
        p.register_post_accumulate_grad_hook(hook)


@pytest.mark.parametrize("fused", [False, *exhaustive(True)])
@ranks(2, exhaustive=(3,))
def test_an_optimizer_for_each_parameter_that_steps_in_backward(rank, world_size, fused):
    pair = Pair(Odd, rank, world_size)
    _step_in_backward(pair.model, lambda p: O.AdamW(p, lr=0.01, fused=fused))
    plain_optimizer = O.AdamW(trainable(pair.plain), lr=0.01, fused=fused)
    for step in range(3):
        for model in (pair.model, pair.plain):
            plain_backward(model, batch(rank, step))
        average_grads(pair.plain)
        plain_optimizer.step()
        plain_optimizer.zero_grad()
        assert all(p.grad is None for p in pair.model.parameters())
    pair.check()


# -- parameters and gradients -----------------------------------------------------------------------------------------------


def _whole_gradients(model):
    generator = torch.Generator().manual_seed(3)
    for p in trainable(model):
        p.grad = in_strides_of(p, torch.randn(p.shape, generator=generator, dtype=p.dtype))


@ranks(2)
def test_gradients_by_hand_without_any_backward(rank, world_size):
    pair = Pair(Odd, rank, world_size, optimizer=MAKE["AdamW"])
    for _ in range(2):
        pair.each(_whole_gradients)
        pair.update()
    same_optimizers(pair.optimizer, pair.plain_optimizer, full=True)


@mostly_adamw
@ranks(2)
def test_parameters_changed_between_steps(rank, world_size, name):
    pair = Pair(Odd, rank, world_size, optimizer=MAKE[name])
    go(pair, 0)
    saved = copy.deepcopy(pair.plain.state_dict())
    with torch.no_grad():
        for model in (pair.model, pair.plain):
            model.up.weight.mul_(0.9)
            model.scale.fill_(0.7)
            model.head.bias.data = torch.ones(3, dtype=torch.float64)
    go(pair, 1)
    with pair.engine.gathered(write=True), torch.no_grad():
        for model in (pair.model, pair.plain):
            model.inp.weight[0] = 0.25
            model.turned.t()[1].zero_()
    go(pair, 2)
    pair.engine.load_state_dict(saved)
    pair.plain.load_state_dict(saved)
    go(pair, 3)
