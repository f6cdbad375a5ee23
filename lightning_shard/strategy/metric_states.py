"""Tensors that modules keep beside parameters, buffers and children, such as the states of metrics."""

from __future__ import annotations

import torch
from torch import nn


def move_states(model: nn.Module, device: torch.device) -> None:
    """Move the tensors that modules in `model` keep beside parameters and buffers to `device`. Not collective.

    Such modules have an ``_apply`` of their class's own. Modules that hold parameters themselves are left alone, since their
    ``_apply`` may be about these (RNNs).
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
