"""Element-wise optimizers of torch, in each of the ways in which it computes a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

O = torch.optim
OPTIMIZERS: dict[str, Callable[[Any], O.Optimizer]] = {
    "SGD": lambda p: O.SGD(p, lr=0.1),
    "SGD momentum": lambda p: O.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "SGD for-loop": lambda p: O.SGD(p, lr=0.1, momentum=0.9, foreach=False),
    "SGD fused": lambda p: O.SGD(p, lr=0.1, momentum=0.9, fused=True),
    "Adam": lambda p: O.Adam(p, lr=0.01),
    "Adam amsgrad": lambda p: O.Adam(p, lr=0.01, amsgrad=True),
    "AdamW for-loop": lambda p: O.AdamW(p, lr=0.01, foreach=False),
    "AdamW foreach": lambda p: O.AdamW(p, lr=0.01, foreach=True),
    "AdamW fused": lambda p: O.AdamW(p, lr=0.01, fused=True),
    "AdamW tensor lr": lambda p: O.AdamW(p, lr=torch.tensor(0.01)),
    "Adagrad": lambda p: O.Adagrad(p, lr=0.05),
    "Adagrad fused": lambda p: O.Adagrad(p, lr=0.05, fused=True),
    "RMSprop": lambda p: O.RMSprop(p, lr=0.01, momentum=0.5, centered=True),
    "RMSprop for-loop": lambda p: O.RMSprop(p, lr=0.01, foreach=False),
    "Adadelta": lambda p: O.Adadelta(p, lr=0.5),
    "Adamax": lambda p: O.Adamax(p, lr=0.01),
    "NAdam": lambda p: O.NAdam(p, lr=0.01),
    "RAdam": lambda p: O.RAdam(p, lr=0.01),
    "ASGD": lambda p: O.ASGD(p, lr=0.1),
    "Rprop": lambda p: O.Rprop(p, lr=0.01),
}


class SAM(torch.optim.SGD):
    """Sharpness-aware minimisation as it is usually written: two closures, and state by parameter."""

    def step(self, closure):
        closure = torch.enable_grad()(closure)
        closure()
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for g in self.param_groups for p in g["params"]]).norm()
            for group in self.param_groups:
                for p in group["params"]:
                    climb = p.grad * (0.05 / (norm + 1e-12))
                    p.add_(climb)
                    self.state[p]["climb"] = climb
        self.zero_grad()
        loss = closure()
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    p.sub_(self.state[p]["climb"])
        super().step()
        return loss


class Decayed(torch.optim.Adam):
    """A subclass that works on the parameters itself and then leaves the rest to its base."""

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.mul_(0.99)
                    p.grad.clamp_(-0.1, 0.1)
        return super().step(closure)
