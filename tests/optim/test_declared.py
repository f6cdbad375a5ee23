"""Optimizers that are not torch's: declared by the user, of packages with kernels of their own, and wrappers."""

from __future__ import annotations

import copy
import ctypes
import types

import pytest
import torch

import torch_shard
from tests.compat.harness import MLP, Pair, batch, plain_backward
from tests.optim.helpers import Bare, Descent, Odd, by_ndim, same_optimizers, trainable
from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from torch_shard.errors import ConfigError, ShardError
from torch_shard.shard_tensor.tensor import ShardTensor


class Signed(Descent):
    """Lion's update. Counts in Python, in its group and in itself, as many optimizers of users do."""

    seen: tuple[type, ...] = ()

    def __init__(self, params, lr=0.01, weight_decay=0.0):
        super().__init__(params, lr, weight_decay=weight_decay, calls=0)
        self.total = 0

    @torch.no_grad()
    def step(self, closure=None):
        self.total += 1
        return super().step(closure)

    def begin(self, group):
        group["calls"] += 1

    def update(self, p, group):
        type(self).seen += (type(p),)
        state = self.state[p]
        if not state:
            state["step"], state["average"] = 0, torch.zeros_like(p)
        state["step"] += 1
        average = state["average"]
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.add_((0.9 * average + 0.1 * p.grad).sign() / state["step"], alpha=-group["lr"])
        # A new tensor each time: the state is what is in the dict, whoever made it.
        state["average"] = 0.99 * average + 0.01 * p.grad


class Declared(Signed):
    pass


torch_shard.optim.register(Declared, kind="elementwise")


@pytest.mark.parametrize("kind", [Signed, Declared])
@pytest.mark.parametrize("with_closure", [False, True])
@ranks(2, exhaustive=(1, 3))
def test_an_own_optimizer_steps_as_on_the_plain_model(rank, world_size, kind, with_closure):
    pair = Pair(Odd, rank, world_size, optimizer=lambda m: kind(by_ndim(m)))
    kind.seen = ()
    for step in range(5):
        pair.model.leave_out = pair.plain.leave_out = step in (2, 3)
        pair.backward(plain_backward, batch(rank, step))
        for optimizer in (pair.optimizer, pair.plain_optimizer):
            assert optimizer.step(*([lambda: 3.0] if with_closure else [])) == (3.0 if with_closure else None)
            optimizer.zero_grad()
    pair.check()
    same_optimizers(pair.optimizer, pair.plain_optimizer)
    assert pair.optimizer.total == 5 and [g["calls"] for g in pair.optimizer.param_groups] == [5, 5]
    assert (ShardTensor in kind.seen) == (kind is Signed)  # the declared one gets plain tensors


class FusedAdam(Descent):
    """Writes to the parameters' memory with a kernel of its own, and counts in its group."""

    def begin(self, group):
        group["step"] = group.get("step", 0) + 1

    def update(self, p, group):
        assert p.is_contiguous() and p.grad.is_contiguous()
        values, grads = (
            (ctypes.c_double * p.numel()).from_address(t.data_ptr()) if p.numel() else () for t in (p, p.grad)
        )
        for i in range(p.numel()):
            values[i] -= group["lr"] / group["step"] * grads[i]


FusedAdam.__module__ = "apex.optimizers.fused_adam"


@ranks(2)
def test_an_optimizer_with_kernels_of_its_own_gets_plain_slices(rank, world_size):
    pair = Pair(MLP, rank, world_size, optimizer=lambda m: FusedAdam(m.parameters()))
    for step in range(3):
        pair.step(plain_backward, batch(rank, step))
    pair.check()
    assert pair.optimizer.param_groups[0]["step"] == 3


class Shapely(Descent):
    def update(self, p, group):
        self.state[p]["rows"] = torch.zeros(2, 3)


torch_shard.optim.register(Shapely, kind="elementwise")


@ranks(2)
def test_one_that_is_declared_falsely_is_an_error(rank, world_size):
    pair = Pair(MLP, rank, world_size)
    optimizer = Shapely(pair.model.parameters())
    pair.backward(plain_backward, batch(rank, 0))
    with pytest.raises(ShardError, match=r"'rows' of .* not shaped like the parameter"):
        optimizer.step()


@pytest.mark.parametrize(("cls", "kind"), [(int, "elementwise"), (3, "matrix"), (Signed, "rows")])
def test_register_refuses_what_is_no_class_or_no_kind(cls, kind):
    with pytest.raises(ConfigError, match="register"):
        torch_shard.optim.register(cls, kind=kind)


def test_a_subclass_is_not_registered_with_its_base():
    class Below(Declared):
        pass

    assert torch_shard.optim.kind_of(Declared) == "elementwise"
    assert torch_shard.optim.kind_of(Below) is None
    assert torch_shard.optim.kind_of(torch.optim.AdamW) == "elementwise"
    assert torch_shard.optim.kind_of(torch.optim.LBFGS) is None


class BareDeclared(Bare):
    pass


torch_shard.optim.register(BareDeclared, kind="elementwise")


@pytest.mark.parametrize("kind", [*exhaustive(Bare), BareDeclared])
@ranks(2, exhaustive=(3,))
def test_an_attached_optimizer_steps_as_on_the_plain_model(rank, world_size, kind):
    pair = Pair(Odd, rank, world_size, optimizer=lambda m: kind(trainable(m)))
    pair.engine.attach(pair.optimizer)
    for step in range(4):
        pair.step(plain_backward, batch(rank, step))
    pair.check()
    same_optimizers(pair.optimizer, pair.plain_optimizer)


@ranks(2)
def test_what_an_attached_optimizer_is_refused_for(rank, world_size):
    pair = Pair(MLP, rank, world_size, optimizer=lambda m: Bare(m.parameters()))
    pair.engine.attach(pair.optimizer)
    pair.engine.attach(torch.optim.SGD(pair.model.parameters()))  # seen anyhow
    with pair.engine.no_sync():
        pair.backward(plain_backward, batch(rank, 0))
    with pytest.raises(ShardError, match="no_sync"):
        pair.optimizer.step()
    pair.check()
    for thing in (object(), pair.model):
        with pytest.raises(ConfigError, match="attach"):
            pair.engine.attach(thing)


def halves(self: Bare) -> None:
    with torch.no_grad():
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(0.5)


@pytest.mark.parametrize("how", ["method", "closure"])
@ranks(2)
def test_a_copy_of_an_attached_optimizer_keeps_the_step_that_replaced_its_own(rank, world_size, how):
    pair = Pair(MLP, rank, world_size, optimizer=lambda m: Bare(m.parameters()))
    copies = []
    for optimizer, model in ((pair.optimizer, pair.model), (pair.plain_optimizer, pair.plain)):
        optimizer.step = types.MethodType(halves, optimizer) if how == "method" else lambda of=optimizer: halves(of)
        if optimizer is pair.optimizer:
            pair.engine.attach(optimizer)
        copied, _ = copy.deepcopy((optimizer, model))
        copied.step()  # a closure steps the original, as it does in plain torch
        copies.append([p.detach() for group in copied.param_groups for p in group["params"]])
    for ours, theirs in zip(*copies, strict=True):
        torch.testing.assert_close(ours.full_tensor(), theirs)
    pair.check()


class Wrapper(torch.optim.Optimizer):
    """Around another one, as Accelerate's is: without its base's __init__."""

    def __init__(self, optimizer):
        self.optimizer = optimizer

    @property
    def param_groups(self):
        return self.optimizer.param_groups

    @property
    def state(self):
        return self.optimizer.state

    def zero_grad(self, set_to_none=True):
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure=None):
        return self.optimizer.step(closure)


@pytest.mark.parametrize("attached", [*exhaustive(False), True])
@ranks(2)
def test_a_wrapper_around_an_optimizer(rank, world_size, attached):
    pair = Pair(MLP, rank, world_size, optimizer=lambda m: Wrapper(torch.optim.AdamW(m.parameters(), lr=0.01)))
    if attached:
        pair.engine.attach(pair.optimizer)
    for step in range(3):
        pair.step(plain_backward, batch(rank, step))
    pair.check()
    same_optimizers(pair.optimizer, pair.plain_optimizer)
