"""What modules keep beside parameters, buffers and children, as metrics do their states."""

from __future__ import annotations

import torch
from torch import nn


def move_states(model: nn.Module, device: torch.device) -> None:
    """Move such states of all modules in `model` to `device`. Not collective.

    These are the modules whose class has an ``_apply`` of its own. Those that hold parameters themselves are left alone, since
    theirs may be about those (RNNs).
    """
    for module in model.modules():
        if type(module)._apply is nn.Module._apply or module._parameters or isinstance(module, nn.RNNBase):
            continue
        if next(module.parameters(), None) is None:
            module.to(device)
            continue
        # A metric with a network in it, whose parameters the engine has placed.
        held = {name: module.__dict__[name] for name in ("_parameters", "_buffers", "_modules")}
        module.__dict__.update({name: {} for name in held})
        try:
            module._apply(lambda tensor: tensor.to(device))
        finally:
            module.__dict__.update(held)
