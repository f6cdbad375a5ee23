"""Steps within steps: a closure that steps, and optimizers that step others."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torch_shard
from tests.compat.harness import MLP, Pair, batch, plain_backward, same_params
from tests.optim.helpers import O
from tests.support.marks import exhaustive, quick
from tests.support.ranks import ranks

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
