"""Hooks that users register on parameters and modules, before and after sharding."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import torch_shard
from tests.compat.harness import MLP, Pair, _sgd, batch, plain_backward, same, same_grads
from tests.compat.modes import as_computed
from tests.support.marks import seldom
from tests.support.ranks import ranks


def _pair(register, when, optimizer=_sgd):
    """A Pair whose hooks are registered by `register(model)` before or after sharding."""
    torch.manual_seed(0)
    pair = Pair.__new__(Pair)
    pair.model = MLP().double()
    pair.plain = as_computed(copy.deepcopy(pair.model))
    handles = [register(pair.plain)]
    if when == "before":
        handles.insert(0, register(pair.model))
    pair.engine = torch_shard.shard(pair.model, unit_bytes=500, timeout=20.0)
    if when == "after":
        handles.insert(0, register(pair.model))
    pair.optimizer, pair.plain_optimizer = optimizer(pair.model), optimizer(pair.plain)
    return pair, handles


WHEN = pytest.mark.parametrize("when", ["before", *seldom("after")])


def _scale_two(model):
    return [
        model.blocks[1].up.weight.register_hook(lambda g: g * 3),
        model.head.bias.register_hook(lambda g: g * 0.5),
    ]


@ranks(2, exhaustive=(3, 4))
@WHEN
def test_gradient_hooks_that_scale_two_parameters_train_like_plain(rank, world_size, when):
    pair, _ = _pair(_scale_two, when)
    for step in range(3):
        pair.step(plain_backward, batch(rank, step))
    pair.check()


@ranks(2)
@WHEN
def test_a_gradient_hook_sees_this_ranks_whole_gradient_as_under_ddp(rank, world_size, when):
    seen = {}

    def register(model):
        def hook(grad):
            seen[id(model)] = grad.clone()

        model.inp.weight.register_hook(hook)

    pair, _ = _pair(register, when)
    pair.each(plain_backward, batch(rank, 0))
    ours, plain = seen[id(pair.model)], seen[id(pair.plain)]
    assert type(ours) is torch.Tensor
    same(ours, plain)


@ranks(2)
def test_a_gradient_hook_on_a_parameter_that_was_frozen_until_now_trains_like_plain(rank, world_size):
    pair = Pair(MLP, rank, world_size, unit_bytes=500)
    weights = [pair.model.blocks[1].up.weight, pair.plain.blocks[1].up.weight]
    for weight in weights:
        weight.requires_grad_(False)
    pair.step(plain_backward, batch(rank, 0))
    for weight in weights:
        weight.requires_grad_(True)
        weight.register_hook(lambda grad: grad * 3)
    for step in range(1, 3):
        pair.step(plain_backward, batch(rank, step))
    pair.check()


@ranks(2)
@WHEN
def test_a_post_accumulate_hook_that_was_removed_is_not_called_again(rank, world_size, when):
    calls = []

    def register(model):
        return [model.inp.bias.register_post_accumulate_grad_hook(lambda p, i=i: calls.append(i)) for i in range(3)]

    pair, handles = _pair(register, when)
    plain_backward(pair.model, batch(rank, 0))
    assert calls == [0, 1, 2]
    handles[0][1].remove()
    plain_backward(pair.model, batch(rank, 1))
    assert calls == [0, 1, 2, 0, 2]


@ranks(2)
@WHEN
def test_a_gradient_hook_that_was_removed_is_not_called_again(rank, world_size, when):
    pair, handles = _pair(_scale_two, when)
    pair.step(plain_backward, batch(rank, 0))
    for handle in handles[0] + handles[1]:
        handle.remove()
    for step in range(1, 3):
        pair.step(plain_backward, batch(rank, step))
    pair.check()


@ranks(2, exhaustive=(3,))
@WHEN
def test_post_accumulate_hooks_keyed_by_parameter_find_their_parameter(rank, world_size, when):
    counts = {}

    def register(model):
        for p in model.parameters():
            counts[p] = 0

            def hook(param):
                assert param.grad is not None
                counts[param] += 1

            p.register_post_accumulate_grad_hook(hook)

    pair, _ = _pair(register, when)
    for step in range(3):
        pair.step(plain_backward, batch(rank, step))
        assert all(counts[p] == step + 1 for m in (pair.model, pair.plain) for p in m.parameters())
    pair.check()


@ranks(2, exhaustive=(3,))
@WHEN
def test_an_optimizer_inside_post_accumulate_hooks_trains_like_plain(rank, world_size, when):
    """One small optimizer for each parameter, stepped as soon as its gradient is there. The plain model's gradients
    are averaged in the hook."""
    optimizers = {}

    def register(model):
        for p in model.parameters():
            optimizers[p] = torch.optim.SGD([p], lr=0.1, momentum=0.9)
            p.register_post_accumulate_grad_hook(_step)

    def _step(param):
        if type(param) is nn.Parameter:
            torch.distributed.all_reduce(param.grad)
            param.grad /= world_size
        optimizers[param].step()
        optimizers[param].zero_grad()

    pair, _ = _pair(register, when)
    for step in range(3):
        pair.each(plain_backward, batch(rank, step))
        assert all(p.grad is None for p in pair.model.parameters())
    pair.check()


@ranks(2)
def test_forward_and_backward_hooks_on_modules_train_like_plain(rank, world_size):
    pair = Pair(MLP, rank, world_size)
    seen = {id(pair.model): [], id(pair.plain): []}
    for model in (pair.model, pair.plain):
        log = seen[id(model)]
        for block in model.blocks:
            block.register_forward_pre_hook(lambda m, args: (args[0] * 1.5,))
            block.register_forward_hook(
                lambda m, args, out, log=log: log.append(m.up.weight.detach().sum()) or out * 0.5
            )
            block.register_full_backward_hook(lambda m, gi, go, log=log: log.append(go[0].sum()) or (gi[0] * 2,))
    for step in range(3):
        pair.step(plain_backward, batch(rank, step))
    for ours, plain in zip(seen[id(pair.model)], seen[id(pair.plain)], strict=True):
        same(ours, plain)
    pair.check()


@ranks(2)
@WHEN
def test_a_deepcopy_has_no_parameter_hooks_as_in_plain_torch(rank, world_size, when):
    def register(model):
        mine = set(model.parameters())
        for p in model.parameters():
            p.register_post_accumulate_grad_hook(mine.remove)
        return _scale_two(model)

    pair, _ = _pair(register, when)
    pair.model, pair.plain = copy.deepcopy(pair.model), copy.deepcopy(pair.plain)
    pair.optimizer, pair.plain_optimizer = _sgd(pair.model), _sgd(pair.plain)
    pair.backward(plain_backward, batch(rank, 0))
    same_grads(pair.model, pair.plain)
    pair.update()
    pair.check()


@ranks(2)
def test_a_gradient_hook_ends_with_the_context_of_its_handle(rank, world_size):
    pair, _ = _pair(lambda model: None, "before")
    for model in (pair.model, pair.plain):
        weight = model.head.weight
        with weight.register_hook(lambda grad: grad * 5):
            pass
    pair.step(plain_backward, batch(rank, 0))
    pair.check()
