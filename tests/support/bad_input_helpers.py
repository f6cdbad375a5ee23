"""A small model, and how the tests of bad input use it."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn


class Net(nn.Module):
    """Three layers, each a unit of its own under `small`; `order` says which run."""

    def __init__(self):
        super().__init__()
        self.first, self.left, self.right, self.last = (nn.Linear(4, 4) for _ in range(4))
        self.order = ["first", "left", "right", "last"]

    def forward(self, x):
        for name in self.order:
            x = torch.tanh(getattr(self, name)(x))
        return x


# Ranks tell each other what they wait for after a second: it takes that long, and on a busy machine longer, until two
# that wait for each other know it.
small = {"units": [nn.Linear], "timeout": 3.0}
# For a rank that waits alone: it waits to the end.
hasty = {**small, "timeout": 1.5}


def step(model, optimizer=None):
    model(torch.ones(2, 4)).sum().backward()
    if optimizer is not None:
        optimizer.step()
        optimizer.zero_grad()


def all_ranks_agree_on(text):
    """Whether every rank saw an error (its text), which also shows that the process group works. Collective."""
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, text)
    return all(everyone)
