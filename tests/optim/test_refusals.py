"""A step that would be wrong is an error on every rank, before parameters or state have changed, and training goes on."""

from __future__ import annotations

import contextlib
import copy

import pytest
import torch
from torch import nn
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.utils._pytree import tree_map

import torch_shard
from tests.compat.harness import Pair, average_grads, batch, loss_of, plain_backward
from tests.optim.helpers import MAKE, Descent, O, Odd, backward_both, go, mostly_adamw, same_optimizers, trainable
from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from torch_shard.errors import ConfigError, ShardError
from torch_shard.frontend.zero_redundancy_optimizer import ZeroRedundancyOptimizer as StandIn
from torch_shard.shard_tensor.tensor import ShardTensor


@contextlib.contextmanager
def untouched(optimizer):
    """Asserts that a block leaves this rank's slices of parameters and state, and the groups, as they were. Not collective."""

    def look():
        parameters = [p for group in optimizer.param_groups for p in group["params"]]
        found = [p.detach() for p in parameters], optimizer.state_dict()
        return tree_map(lambda t: copy.deepcopy(t.to_local() if isinstance(t, ShardTensor) else t), found)

    before = look()
    yield
    torch.testing.assert_close(look(), before, rtol=0, atol=0)


def refused(optimizer, *words, closure=None):
    """The step is a ShardError that holds all these words, and leaves no trace. Returns its message."""
    with untouched(optimizer):
        with pytest.raises(ShardError) as caught:
            optimizer.step() if closure is None else optimizer.step(closure)
        for word in words:
            assert word in str(caught.value), f"{word!r} is not in: {caught.value}"
    return str(caught.value)


# -- a step at the wrong time or over the wrong things -------------------------------------------------------------------------


@pytest.mark.parametrize("how", [{}, {"write": True}, *exhaustive({"write": True, "grads": True})], ids=str)
@pytest.mark.parametrize("part", ["up", *exhaustive("")], ids=["a part", "all"])
@mostly_adamw
@ranks(2)
def test_a_step_inside_gathered_is_refused(rank, world_size, name, part, how):
    pair = Pair(Odd, rank, world_size, optimizer=MAKE[name])
    backward_both(pair, 0)
    gathered = pair.engine.gathered(pair.model.get_submodule(part), **how)
    with untouched(pair.optimizer), gathered, pytest.raises(ShardError, match=r"(?s)step.*gathered"):
        pair.optimizer.step()
    pair.check()
    pair.update()  # the gradients are still there
    go(pair, 1)


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


@pytest.mark.parametrize("make", [Descent, *exhaustive(O.SGD)])
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


@ranks(2)
def test_a_parameter_that_is_listed_twice_is_refused(rank, world_size):
    pair = Pair(Odd, rank, world_size, optimizer=lambda model: O.SGD(trainable(model), lr=0.1, momentum=0.9))
    go(pair, 0)
    pair.optimizer.param_groups.append({**pair.optimizer.param_groups[0], "params": [pair.model.up.weight]})
    plain_backward(pair.model, batch(rank, 1))
    with pytest.raises(ConfigError, match=r"up\.weight more than once"):
        pair.optimizer.step()
    pair.check()


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


@pytest.mark.parametrize("kind", [O.Adam, *exhaustive(O.SGD)])
@ranks(2)
def test_a_differentiable_optimizer_is_refused(rank, world_size, kind):
    pair = Pair(Odd, rank, world_size)
    optimizer = kind(trainable(pair.model), lr=0.1, differentiable=True)
    backward_both(pair, 0)
    refused(optimizer, kind.__name__, "differentiable")
    pair.update()
    go(pair, 1)


class AdamW8bit(Descent):
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


@pytest.mark.parametrize("when", ["before", "after"])
@ranks(2)
def test_torchs_zero_redundancy_optimizer_is_refused_with_its_inner_class(rank, world_size, when):
    model = Odd().double()
    zero = ZeroRedundancyOptimizer(model.parameters(), O.AdamW, lr=0.1) if when == "before" else None
    torch_shard.shard(model)
    optimizer = zero or ZeroRedundancyOptimizer(model.parameters(), O.AdamW, lr=0.1)
    plain_backward(model, batch(rank, 0))
    plain = O.AdamW(trainable(model))
    with (
        untouched(plain),
        pytest.raises(ShardError, match=r"(?s)ZeroRedundancy.*\(AdamW\).* shards optimizer state already"),
    ):
        optimizer.step()
    plain_backward(model, batch(rank, 1))  # training goes on with the inner class
    plain.step()


def test_the_runners_zero_redundancy_optimizer_steps_by_itself_only():
    model = nn.Linear(2, 2)
    with pytest.raises(ConfigError, match="overlap_with_ddp"):
        StandIn(model.parameters(), optimizer_class=O.SGD, overlap_with_ddp=True, lr=0.1)
    optimizer = StandIn(model.parameters(), O.SGD, None, True, lr=0.1, momentum=0.9)
    assert isinstance(optimizer, StandIn) and isinstance(optimizer, O.SGD) and optimizer.defaults["momentum"] == 0.9
    twin = copy.deepcopy(optimizer)
    assert type(twin) is type(optimizer) and twin.param_groups[0]["params"] is not optimizer.param_groups[0]["params"]
