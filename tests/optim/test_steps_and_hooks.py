"""What a user has around an optimizer step and inside it: hooks, closures, subclasses, scalers."""

from __future__ import annotations

import copy
import functools
import gc
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import torch_shard
from tests.compat.harness import MLP, Pair, average_grads, batch, plain_backward, same, same_params
from tests.optim.helpers import (
    MAKE,
    O,
    Odd,
    backward_both,
    both,
    by_ndim,
    copy_grads,
    go,
    mostly_adamw,
    mostly_sgd,
    same_optimizers,
    step_hooks,
    trainable,
)
from tests.support.marks import exhaustive, quick
from tests.support.ranks import ranks

# -- hooks --------------------------------------------------------------------------------------------------------------


def look(optimizer):
    """What a hook finds, parameter by parameter. Collective for a sharded model."""
    found = []
    for group in optimizer.param_groups:
        for p in group["params"]:
            state = optimizer.state.get(p, {})
            for key, value in state.items():
                if value.dim():
                    assert type(value) is type(p.data), (type(value), key)
                found.append((tuple(p.shape), key, tuple(value.shape), value.dtype, float(value.norm())))
    saved = optimizer.state_dict()
    entries = [(i, k, tuple(v.shape)) for i, state in saved["state"].items() for k, v in state.items()]
    return [*found, *entries, *[group["params"] for group in saved["param_groups"]]]


@pytest.mark.parametrize("order", ["before sharding", "after sharding"])
@pytest.mark.parametrize("where", ["instance", *exhaustive("global")])
@mostly_adamw
@ranks(2)
def test_step_hooks_see_the_state_of_each_parameter(rank, world_size, where, order, name):
    torch.manual_seed(0)
    model = Odd().double()
    plain = copy.deepcopy(model)
    if order == "after sharding":
        torch_shard.shard(model, unit_bytes=500)
    optimizers = [MAKE[name](m) for m in (model, plain)]
    seen = {id(optimizer): [] for optimizer in optimizers}

    def hook(optimizer, args, kwargs):
        seen[id(optimizer)].append(look(optimizer))

    with step_hooks(optimizers, where, hook, hook):
        if order == "before sharding":
            torch_shard.shard(model, unit_bytes=500)
        for step in range(3):
            for m in (model, plain):
                plain_backward(m, batch(rank, step))
            average_grads(plain)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    ours, theirs = seen.values()
    assert len(ours) == 6 and ours == [_approximately(entries) for entries in theirs]
    same_optimizers(*optimizers)


def _approximately(entries):
    return [(*e[:-1], pytest.approx(e[-1], rel=1e-9, abs=1e-9)) if len(e) == 5 else e for e in entries]


@pytest.mark.parametrize("where", ["instance", "global"])
@mostly_sgd
@ranks(2)
def test_what_a_hook_edits_counts_for_the_step(rank, world_size, where, name):
    pair = Pair(Odd, rank, world_size, optimizer=MAKE[name])

    @torch.no_grad()
    def before(optimizer, args, kwargs):
        first, second = optimizer.param_groups
        for p in first["params"]:
            p.grad.mul_(0.5)
        second["params"][0].grad = second["params"][0].grad + 1.0
        second["params"][1].grad = None
        second["lr"] *= 1.5
        first["weight_decay"] = 0.2

    @torch.no_grad()
    def after(optimizer, args, kwargs):
        (optimizer,) = args  # the same
        p = optimizer.param_groups[0]["params"][0]
        p.clamp_(-0.3, 0.3)
        key = next(key for key in optimizer.state[p] if key != "step")
        optimizer.state[p][key].mul_(0.5)

    with step_hooks([pair.optimizer, pair.plain_optimizer], where, before, after):
        go(pair, 0, 3)


@ranks(2)
def test_a_pre_hook_that_gives_the_step_another_closure(rank, world_size):
    pair = Pair(Odd, rank, world_size, optimizer=MAKE["AdamW"])
    backward_both(pair, 0)

    def before(optimizer, args, kwargs):
        return (*args[:1], lambda: 5.0), {}

    with step_hooks([pair.optimizer, pair.plain_optimizer], "instance", before):
        assert [optimizer.step() for _, optimizer in both(pair)] == [5.0, 5.0]
    same_optimizers(pair.optimizer, pair.plain_optimizer)


# -- subclasses and closures -----------------------------------------------------------------------------------------------


class MyAdamW(O.AdamW):
    """Changes the rate, steps twice in one step, and shrinks the parameters afterwards."""

    def step(self, closure=None):
        for group in self.param_groups:
            group["lr"] *= 0.9
        loss = super().step(closure)
        super().step()
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.mul_(0.99)
        return loss


class SAM(torch.optim.Optimizer):
    """Sharpness-aware minimisation, as it is found in many repositories."""

    def __init__(self, params, base_optimizer, rho=0.05, **kwargs):
        super().__init__(params, {"rho": rho, **kwargs})
        self.base_optimizer = base_optimizer(self.param_groups, **kwargs)
        self.param_groups = self.base_optimizer.param_groups
        self.defaults.update(self.base_optimizer.defaults)

    @torch.no_grad()
    def first_step(self):
        scale = 0.05 / (self._grad_norm() + 1e-12)
        for p in self._trained():
            self.state[p]["old_p"] = p.data.clone()
            p.add_(p.grad * scale.to(p))
        self.zero_grad()

    @torch.no_grad()
    def second_step(self):
        for p in self._trained():
            p.data = self.state[p]["old_p"]
        self.base_optimizer.step()
        self.zero_grad()

    @torch.no_grad()
    def step(self, closure):
        closure = torch.enable_grad()(closure)
        loss = closure()
        self.first_step()
        closure()
        self.second_step()
        return loss

    def _trained(self):
        return [p for group in self.param_groups for p in group["params"] if p.grad is not None]

    def _grad_norm(self):
        return torch.norm(torch.stack([p.grad.norm(p=2) for p in self._trained()]), p=2)


def closure(pair, model, optimizer, x, calls):
    calls.append(model)
    optimizer.zero_grad()
    loss = plain_backward(model, x)
    if model is pair.plain:
        average_grads(model)
    return loss


WITH_CLOSURE = {
    **MAKE,
    "a subclass": lambda m: MyAdamW(by_ndim(m), lr=0.01),
    "SAM over SGD": lambda m: SAM(by_ndim(m), O.SGD, lr=0.1, momentum=0.9),
    "SAM over AdamW": lambda m: SAM(by_ndim(m), O.AdamW, lr=0.01),
}


@pytest.mark.parametrize("name", ["AdamW", "a subclass", "SAM over SGD", *exhaustive("AdamW fused", "SAM over AdamW")])
@ranks(2, exhaustive=(3,))
def test_a_step_with_a_closure_returns_its_loss_and_is_that_of_the_plain_model(rank, world_size, name):
    pair = Pair(Odd, rank, world_size, optimizer=WITH_CLOSURE[name])
    for step in range(3):
        calls = []
        losses = [o.step(functools.partial(closure, pair, m, o, batch(rank, step), calls)) for m, o in both(pair)]
        assert len(calls) == (4 if "SAM" in name else 2)
        same(*losses, "loss")
        pair.check()
    ours, theirs = (getattr(o, "base_optimizer", o) for _, o in both(pair))
    same_optimizers(ours, theirs)


# -- zero_grad and scalers --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["one element", "the batch of one rank"])
@pytest.mark.parametrize("unscale", [True, *exhaustive(False)])
@pytest.mark.parametrize("name", ["AdamW fused", *exhaustive("AdamW")])
@ranks(2)
def test_a_scaled_step_with_an_inf_is_skipped_on_all_ranks(rank, world_size, where, unscale, name):
    pair = Pair(Odd, rank, world_size, optimizer=MAKE[name], double=False)
    scalers = [torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2) for _ in range(2)]
    for step in range(5):
        x = batch(rank, step).float()
        if step == 2 and where == "the batch of one rank" and rank == 1:
            x[0, 0] = float("inf")
        scale = scalers[0].get_scale()
        scalers[0].scale(pair.model(x).pow(2).mean()).backward()
        scalers[1].scale(torch.zeros(()))  # makes its scale
        if step == 2 and where == "one element":
            pair.model.one.grad = torch.full((1,), float("inf"))  # in the slice of one rank
        copy_grads(pair.model, pair.plain)
        before = copy.deepcopy(pair.plain)
        for (model, optimizer), scaler in zip(both(pair), scalers, strict=True):
            if unscale:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(trainable(model), 0.5)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        assert scalers[0].get_scale() == scalers[1].get_scale()
        same_optimizers(pair.optimizer, pair.plain_optimizer, rtol=1e-6, atol=1e-6)
        if step == 2:
            assert scalers[0].get_scale() == scale / 2
            assert all(torch.equal(p, q) for p, q in zip(pair.plain.parameters(), before.parameters(), strict=True))


# -- steps within steps ------------------------------------------------------------------------------------------------


INNER = {
    "AdamW": lambda m: O.AdamW(m.parameters(), lr=0.1),
    "SGD": lambda m: O.SGD(m.parameters(), lr=0.1, momentum=0.9),
    "Adafactor": lambda m: O.Adafactor(m.parameters(), lr=0.1),
}


@pytest.mark.parametrize("name", quick(INNER, ["AdamW"]))
@ranks(2, exhaustive=(1, 3))
def test_a_closure_may_step_the_same_optimizer(rank, world_size, name):
    pair = Pair(MLP, rank, world_size, optimizer=INNER[name])
    for step in range(2):
        for model, optimizer in ((pair.model, pair.optimizer), (pair.plain, pair.plain_optimizer)):

            def closure(model: Any = model, optimizer: Any = optimizer, step: int = step) -> torch.Tensor:
                for part in range(2):
                    optimizer.zero_grad()
                    loss: torch.Tensor = plain_backward(model, batch(0, 2 * step + part))
                    if part == 0:
                        optimizer.step()
                return loss

            optimizer.step(closure)
    same_params(pair.model, pair.plain)


class Averages(O.Optimizer):
    """Lookahead, as it is written: steps another optimizer, and draws the parameters back now and then."""

    def __init__(self, params: Any, inner: Any) -> None:
        super().__init__(params, {"rounds": 0})
        self.inner = inner

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["slow"] = p.clone()
                p.mul_(0.9)
        self.inner.step()
        for group in self.param_groups:
            group["rounds"] += 1
            for p in group["params"]:
                p.lerp_(self.state[p]["slow"], 0.5)


@pytest.mark.parametrize("kind", ["elementwise", "matrix"])
@pytest.mark.parametrize("inner", ["AdamW", *exhaustive("Adafactor")])
@ranks(2, exhaustive=(1, 3))
def test_a_declared_optimizer_may_step_another_one(rank, world_size, inner, kind):
    class Kind(Averages):
        pass

    torch_shard.optim.register(Kind, kind=kind)
    pair = Pair(MLP, rank, world_size, optimizer=lambda m: Kind(m.parameters(), INNER[inner](m)))
    for step in range(3):
        pair.step(plain_backward, batch(rank, step))
        same_params(pair.model, pair.plain)


@ranks(1)
def test_an_engine_may_be_collected_while_torch_calls_hooks_of_a_step(rank, world_size):
    optimizer = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1)
    handle = register_optimizer_step_pre_hook(lambda *args: gc.collect() and None)
    gc.disable()
    try:
        for _ in range(2):
            torch_shard.shard(nn.Linear(2, 2))  # garbage at once, in reference cycles
        optimizer.step()
    finally:
        gc.enable()
        handle.remove()
