"""State of plain optimizers, for comparison with what the engine gives."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn


def by_name(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """A copy of a plain optimizer's state dict, with names in place of numbers."""
    names = {id(p): name for name, p in model.named_parameters()}
    params = [names[id(p)] for group in optimizer.param_groups for p in group["params"]]
    given = copy.deepcopy(optimizer.state_dict())
    return {
        "state": {params[number]: own for number, own in given["state"].items()},
        "param_groups": [{**group, "params": [params[n] for n in group["params"]]} for group in given["param_groups"]],
    }
