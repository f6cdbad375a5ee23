"""A step that would be wrong is an error on every rank, before parameters or state have changed, and training goes on."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import torch_shard
from tests.compat.harness import Pair, average_grads, batch, loss_of, plain_backward, same_params
from tests.optim.helpers import (
    MAKE,
    O,
    Odd,
    backward_both,
    go,
    mostly_adamw,
    same_optimizers,
    trainable,
)
from tests.support.marks import exhaustive, quick
from tests.support.ranks import ranks
from torch_shard.errors import NeedsGatherError, ShardError
from torch_shard.shard_tensor.tensor import ShardTensor


class Untouched:
    """Asserts that a block leaves this rank's slices, and the state, of some optimizers as they were. Not collective."""

    def __init__(self, *optimizers):
        self.optimizers = optimizers

    def look(self):
        parameters = [p for o in self.optimizers for group in o.param_groups for p in group["params"]]
        slices = [p.to_local().clone() if isinstance(p, ShardTensor) else p.detach().clone() for p in parameters]
        return slices, [copy.deepcopy(o.state_dict()) for o in self.optimizers]

    def __enter__(self):
        self.before = self.look()

    def __exit__(self, kind, *_):
        if kind is not None:
            return
        (slices, states), (old_slices, old_states) = self.look(), self.before
        for now, then in zip(slices, old_slices, strict=True):
            assert torch.equal(now, then)
        for now, then in zip(states, old_states, strict=True):
            assert now["param_groups"] == then["param_groups"]
            assert now["state"].keys() == then["state"].keys()
            for i, state in then["state"].items():
                assert now["state"][i].keys() == state.keys()
                for key, value in state.items():
                    found = now["state"][i][key]
                    assert type(found) is type(value), key
                    assert not isinstance(value, torch.Tensor) or torch.equal(_slice(found), _slice(value)), key


def _slice(tensor):
    return tensor.to_local() if isinstance(tensor, ShardTensor) else tensor


def refused(optimizer, *words, closure=None):
    """The step is a ShardError that holds all these words, and leaves no trace. Returns its message."""
    with Untouched(optimizer):
        with pytest.raises(ShardError) as caught:
            optimizer.step() if closure is None else optimizer.step(closure)
        for word in words:
            assert word in str(caught.value), f"{word!r} is not in: {caught.value}"
    return str(caught.value)


# -- a step at the wrong time or over the wrong things -------------------------------------------------------------------------


GATHERED = {
    "all": lambda pair: pair.engine.gathered(),
    "for writing": lambda pair: pair.engine.gathered(write=True),
    "a part": lambda pair: pair.engine.gathered(pair.model.up),
    "with gradients": lambda pair: pair.engine.gathered(write=True, grads=True),
}


@pytest.mark.parametrize("how", quick(GATHERED, ["all", "for writing"]))
@pytest.mark.parametrize("first", [0, *exhaustive(1)])
@mostly_adamw
@ranks(2)
def test_a_step_inside_gathered_is_refused(rank, world_size, name, how, first):
    pair = Pair(Odd, rank, world_size, optimizer=MAKE[name])
    if first:
        go(pair, 0)
    backward_both(pair, first)
    with Untouched(pair.optimizer), GATHERED[how](pair), pytest.raises(ShardError, match=r"(?s)step.*gathered"):
        pair.optimizer.step()
    pair.check()
    pair.update()  # the gradients are still there
    go(pair, first + 1)


@pytest.mark.parametrize("how", ["plainly", *exhaustive("through a closure"), "in a closure"])
@mostly_adamw
@ranks(2, exhaustive=(3,))
def test_a_step_with_gradients_that_are_not_reduced_is_refused(rank, world_size, name, how):
    pair = Pair(Odd, rank, world_size, optimizer=MAKE[name])
    go(pair, 0)

    def unreduced():
        with pair.engine.no_sync():
            return plain_backward(pair.model, batch(rank, 1))

    if how == "in a closure":
        refused(pair.optimizer, "no_sync", closure=unreduced)
    else:
        unreduced()
        refused(pair.optimizer, "no_sync", closure=None if how == "plainly" else lambda: 1.0)
    pair.check()
    # The gradient that was held counts, once a backward reduces it.
    plain_backward(pair.plain, batch(rank, 1))
    backward_both(pair, 2)
    pair.update()
    same_optimizers(pair.optimizer, pair.plain_optimizer)
    go(pair, 3)


class PlainSteps(torch.optim.Optimizer):
    """Of no kind."""

    def __init__(self, params):
        super().__init__(params, {})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad)


@pytest.mark.parametrize("make", [PlainSteps, *exhaustive(O.SGD)])
@ranks(3)
def test_ranks_whose_unreduced_gradients_are_zero_refuse_the_step_too(rank, world_size, make):
    model = nn.Embedding(12, 4)
    engine = torch_shard.shard(model)
    optimizer = make(model.parameters())
    with engine.no_sync():
        model(torch.tensor([0, 1])).sum().backward()  # of rows that rank 0 has
    with pytest.raises(ShardError, match="no_sync"):
        optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    optimizer.step()


@ranks(2)
def test_a_closure_that_reduces_what_was_held_back_is_right(rank, world_size):
    pair = Pair(Odd, rank, world_size, optimizer=MAKE["AdamW"])
    with pair.engine.no_sync():
        plain_backward(pair.model, batch(rank, 0))
    plain_backward(pair.plain, batch(rank, 0))
    pair.optimizer.step(lambda: plain_backward(pair.model, batch(rank, 1)))
    plain_backward(pair.plain, batch(rank, 1))
    average_grads(pair.plain)
    pair.plain_optimizer.step()
    same_optimizers(pair.optimizer, pair.plain_optimizer)


# -- bad gradients and state ------------------------------------------------------------------------------------------------


@ranks(2)
def test_a_gradient_of_another_shape_or_dtype_is_refused_where_it_is_assigned(rank, world_size):
    pair = Pair(Odd, rank, world_size, optimizer=MAKE["AdamW"])
    backward_both(pair, 0)
    p = pair.model.up.weight
    good = p.grad
    with Untouched(pair.optimizer):
        for wrong in (torch.ones(3, 3), torch.ones(77), good.to_local(), pair.model.inp.weight.grad):
            with pytest.raises(NeedsGatherError, match=r"\.grad of the sharded up\.weight"):
                p.grad = wrong
        with pytest.raises(RuntimeError):  # torch's own, or ours
            p.grad = torch.ones(11, 7, dtype=torch.float32)
        assert p.grad is good
    pair.update()
    same_optimizers(pair.optimizer, pair.plain_optimizer)


@mostly_adamw
@ranks(2)
def test_state_of_another_shape_is_refused_by_name(rank, world_size, name):
    pair = Pair(Odd, rank, world_size, optimizer=MAKE[name])
    go(pair, 0)
    backward_both(pair, 1)
    key = "momentum_buffer" if name == "SGD" else "exp_avg"
    state = pair.optimizer.state[pair.model.up.weight]
    good, state[key] = state[key], torch.ones(2, 7, 11, dtype=torch.float64)
    refused(pair.optimizer, "up.weight")
    assert state[key].shape == (2, 7, 11)
    state[key] = good
    pair.update()
    go(pair, 2)


# -- optimizers that are not element-wise --------------------------------------------------------------------------------------


class Matrices(torch.optim.Optimizer):
    """Steps what it can element by element, with state, before it comes to a matrix product."""

    def __init__(self, params, lr=0.1, begin=0):
        super().__init__(params, {"lr": lr})
        self.begin, self.calls = begin, 0

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else torch.enable_grad()(closure)()
        parameters = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        for p in sorted(parameters, key=lambda p: p.ndim):
            state = self.state[p]
            state["average"] = state.get("average", torch.zeros_like(p)).lerp_(p.grad, 0.1)
            state["step"] = state.get("step", 0) + 1
            update = state["average"]
            if p.ndim == 2 and self.calls >= self.begin:
                update = (p.grad @ p.grad.T).trace() * update
            p.add_(update, alpha=-0.1)
        self.calls += 1
        return loss


class ElementWise(torch.optim.Optimizer):
    """Unknown to the engine, and right on slices: Lion, as it is found in many repositories."""

    def __init__(self, params, lr=0.01, betas=(0.9, 0.99), weight_decay=0.1):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure=None):
        loss = None if closure is None else torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in filter(lambda p: p.grad is not None, group["params"]):
                state = self.state[p]
                if len(state) == 0:
                    state["exp_avg"] = torch.zeros_like(p)
                beta1, beta2 = group["betas"]
                p.data.mul_(1 - group["lr"] * group["weight_decay"])
                update = state["exp_avg"].clone().mul_(beta1).add(p.grad, alpha=1 - beta1).sign_()
                p.add_(update, alpha=-group["lr"])
                state["exp_avg"].mul_(beta2).add_(p.grad, alpha=1 - beta2)
        return loss


@ranks(2, exhaustive=(3,))
def test_an_unknown_optimizer_that_is_element_wise_steps_as_on_the_plain_model(rank, world_size):
    pair = Pair(Odd, rank, world_size, optimizer=lambda m: ElementWise(trainable(m)))
    go(pair, 0, 3)
    same_params(pair.model, pair.plain)


@pytest.mark.parametrize("closure", [*exhaustive(False), True])
@ranks(2, exhaustive=(3,))
def test_an_unknown_optimizer_of_whole_matrices_is_refused_by_name(rank, world_size, closure):
    pair = Pair(Odd, rank, world_size, optimizer=lambda m: Matrices(trainable(m), begin=1))
    go(pair, 0)
    backward_both(pair, 1)
    for _ in range(2):  # also the second time
        with pytest.raises(ShardError, match=r"(?s)Matrices.*may have changed.*torch_shard\.optim\.register"):
            pair.optimizer.step(*([lambda: loss_of(pair.model(batch(rank, 0)))] if closure else []))
    assert pair.model.up.weight.grad[0].shape == (7,)  # outside the step views are there again


@ranks(2)
def test_lbfgs_is_refused_at_its_first_step(rank, world_size):
    pair = Pair(Odd, rank, world_size)
    optimizer = O.LBFGS(trainable(pair.model), lr=0.1, max_iter=3)

    def closure():
        optimizer.zero_grad()
        return plain_backward(pair.model, batch(rank, 0))

    refused(optimizer, "LBFGS", "gathered", closure=closure)
    optimizer.zero_grad()
    go(pair, 1)


@pytest.mark.parametrize("kind", [*exhaustive(O.SGD), O.Adam, *exhaustive(O.AdamW, O.RMSprop, O.Adagrad, O.NAdam)])
@ranks(2)
def test_a_differentiable_optimizer_is_refused(rank, world_size, kind):
    pair = Pair(Odd, rank, world_size)
    optimizer = kind(trainable(pair.model), lr=0.1, differentiable=True)
    backward_both(pair, 0)
    refused(optimizer, kind.__name__, "differentiable")
    pair.update()
    go(pair, 1)


class AdamW8bit(ElementWise):
    """Stands for the one that writes blocks of quantized state with kernels of its own."""


AdamW8bit.__module__ = "bitsandbytes.optim.adamw"


@ranks(2)
def test_an_optimizer_of_bitsandbytes_is_refused_with_the_reason(rank, world_size):
    pair = Pair(Odd, rank, world_size)
    optimizer = AdamW8bit(trainable(pair.model))
    backward_both(pair, 0)
    message = refused(optimizer, "AdamW8bit", "bitsandbytes")
    assert any(reason in message for reason in ("block", "quantiz", "8-bit", "8 bit", "kernel")), message
    pair.update()
    go(pair, 1)


# -- beside each other ------------------------------------------------------------------------------------------------------
