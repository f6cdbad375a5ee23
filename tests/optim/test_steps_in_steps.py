"""Steps within steps: a closure that steps, optimizers that step others, and what is undone when one is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import torch_shard
from tests.compat.harness import MLP, Pair, batch, plain_backward, same_params
from tests.optim.helpers import O
from tests.support.marks import exhaustive, quick
from tests.support.ranks import ranks
from torch_shard.errors import NeedsGatherError

MAKE = {
    "AdamW": lambda m: O.AdamW(m.parameters(), lr=0.1),
    "SGD": lambda m: O.SGD(m.parameters(), lr=0.1, momentum=0.9),
    "Adafactor": lambda m: O.Adafactor(m.parameters(), lr=0.1),
}


@pytest.mark.parametrize("name", quick(MAKE, ["AdamW"]))
@ranks(2, exhaustive=(1, 3))
def test_a_closure_may_step_the_same_optimizer(rank, world_size, name):
    pair = Pair(MLP, rank, world_size, optimizer=MAKE[name])
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


class Shrinks(O.Optimizer):
    """Not known to the engine. Changes everything that an optimizer has, and comes to a matrix product at the end."""

    def __init__(self, params: Any, inner: Any = None) -> None:
        super().__init__(params, {"rounds": 0, "total": torch.zeros(()), "list": [1]})
        self.inner, self.calls, self.name = inner, 0, "new"

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.calls, self.name = self.calls + 1, "used"
        for group in self.param_groups:
            group["rounds"] += 1
            group["total"] += 1
            group["list"].append(2)
            group["new"] = True
            for p in group["params"]:
                self.state[p]["sums"] = [p.grad.clone()]
                p.grad.add_(p)
                p.mul_(0.5)
        self.state["all"]["n"] = 1
        if self.inner is not None:
            self.inner.step()
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_((p.grad @ p.grad.T).trace()) if p.dim() == 2 else p.zero_()


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
    pair = Pair(MLP, rank, world_size, optimizer=lambda m: Kind(m.parameters(), MAKE[inner](m)))
    for step in range(3):
        pair.step(plain_backward, batch(rank, step))
        same_params(pair.model, pair.plain)


class Descends(O.Optimizer):
    """Not known either, and element-wise."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(p.grad, alpha=0.1)


class WithPlain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = MLP()
        self.apart = nn.Parameter(torch.ones(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.inner(x)
        return y * self.apart.sum()


@pytest.mark.parametrize("nested", [False, True])
@ranks(2, exhaustive=(1, 3))
def test_a_refused_step_is_undone_with_all_that_it_changed(rank, world_size, nested):
    torch.manual_seed(0)
    model = WithPlain().double()
    torch_shard.shard(model, ignore=["apart"])
    inner = Descends(model.inner.parameters()) if nested else None
    optimizer = Shrinks(model.parameters(), inner)
    plain_backward(model, batch(rank, 0))

    def values() -> list[torch.Tensor]:
        return [getattr(p, "_local", p).detach().clone() for p in model.parameters()]

    before = values()
    gradients = [None if p.grad is None else getattr(p.grad, "_local", p.grad).clone() for p in model.parameters()]
    for _ in range(2):
        with pytest.raises(NeedsGatherError, match=r"Shrinks.step\(\), .* the step is undone"):
            optimizer.step()
        for p, kept in zip(model.parameters(), gradients, strict=True):
            assert p.grad is None if kept is None else torch.equal(getattr(p.grad, "_local", p.grad), kept)
        assert all(map(torch.equal, values(), before))
        (group,) = optimizer.param_groups
        assert (group["rounds"], float(group["total"]), group["list"], "new" in group) == (0, 0.0, [1], False)
        assert not optimizer.state and (optimizer.calls, optimizer.name) == (0, "new")
