"""Hooks that users register on parameters and modules, before and after sharding."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.compat.harness import MLP, Pair, batch, plain_backward, same
from tests.support.marks import seldom
from tests.support.ranks import ranks


def _pair(register, when, rank, world_size):
    """A Pair whose hooks are registered by `register(model)` before or after sharding."""
    pair = Pair(MLP, rank, world_size, prepare=register if when == "before" else None)
    if when == "after":
        pair.each(register)
    return pair


WHEN = pytest.mark.parametrize("when", ["before", *seldom("after")])


def _scale_two(model):
    return [
        model.blocks[1].up.weight.register_hook(lambda g: g * 3),
        model.head.bias.register_hook(lambda g: g * 0.5),
    ]


@ranks(2)
@WHEN
def test_a_gradient_hook_sees_this_ranks_whole_gradient_as_under_ddp(rank, world_size, when):
    seen = {}

    def register(model):
        def hook(grad):
            seen[id(model)] = grad.clone()

        model.inp.weight.register_hook(hook)

    pair = _pair(register, when, rank, world_size)
    pair.each(plain_backward, batch(rank, 0))
    ours, plain = seen[id(pair.model)], seen[id(pair.plain)]
    assert type(ours) is torch.Tensor
    same(ours, plain)


@ranks(2)
def test_a_gradient_hook_on_a_parameter_that_was_frozen_until_now_trains_like_plain(rank, world_size):
    pair = Pair(MLP, rank, world_size)
    weights = [pair.model.blocks[1].up.weight, pair.plain.blocks[1].up.weight]
    for weight in weights:
        weight.requires_grad_(False)
    pair.step(plain_backward, batch(rank, 0))
    for weight in weights:
        weight.requires_grad_(True)
        weight.register_hook(lambda grad: grad * 3)
    pair.train(*range(1, 3))


@ranks(2)
@WHEN
def test_a_post_accumulate_hook_that_was_removed_is_not_called_again(rank, world_size, when):
    calls, handles = [], {}

    def register(model):
        hook = model.inp.bias.register_post_accumulate_grad_hook
        handles[model] = [hook(lambda p, i=i: calls.append(i)) for i in range(3)]

    pair = _pair(register, when, rank, world_size)
    plain_backward(pair.model, batch(rank, 0))
    assert calls == [0, 1, 2]
    handles[pair.model][1].remove()
    plain_backward(pair.model, batch(rank, 1))
    assert calls == [0, 1, 2, 0, 2]


@ranks(2, exhaustive=(3, 4))
@WHEN
def test_gradient_hooks_that_scale_train_like_plain_until_they_are_removed(rank, world_size, when):
    handles = []
    pair = _pair(lambda model: handles.extend(_scale_two(model)), when, rank, world_size)
    pair.step(plain_backward, batch(rank, 0))
    for handle in handles:
        handle.remove()
    pair.train(*range(1, 3))


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

    pair = _pair(register, when, rank, world_size)
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

    pair = _pair(register, when, rank, world_size)
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
        _scale_two(model)

    pair = _pair(register, when, rank, world_size)
    pair.copied().train(0)


@ranks(2)
def test_a_gradient_hook_ends_with_the_context_of_its_handle(rank, world_size):
    pair = Pair(MLP, rank, world_size)
    for model in (pair.model, pair.plain):
        weight = model.head.weight
        with weight.register_hook(lambda grad: grad * 5):
            pass
    pair.train(0)
