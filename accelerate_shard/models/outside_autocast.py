"""Layers that are called where autocast is off, though their parameters are gathered in its dtype.

Accelerate puts autocast around the model's forward. ``model.encoder(x)`` (generation of encoder-decoder models), or a layer that
the model calls under ``autocast(enabled=False)``, gets fp32 inputs. Under DDP such a layer computes in fp32. A sharded layer has
gathered weights in the low dtype, so its inputs are cast to that dtype and its outputs back.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from torch_shard import Precision
from torch_shard.frontend import cast, cast_outputs


def register(model: nn.Module, precision: Precision, device: torch.device) -> None:
    """Hook the layers of a sharded `model` whose parameters are gathered in another dtype than they are stored in.

    Not collective. The hooks look at the parameters as they are when the layer is called: they do nothing to full ones.
    """
    kept = {inner for top in precision.kept_modules(model) for inner in top.modules()}
    for module in model.modules():
        own = _castable(module)
        stored = [p.dtype for name, p in own.items() if not precision.keeps([(module, name)], p)]
        if stored and module not in kept and precision.param_dtype not in (None, stored[0]):
            before = _CastInputs(device.type)
            module.register_forward_pre_hook(before, with_kwargs=True)
            module.register_forward_hook(_CastBack(before, stored[0]), always_call=True)


def _castable(module: nn.Module) -> dict[str, nn.Parameter]:
    found = module.named_parameters(recurse=False)
    return {name: p for name, p in found if p.is_floating_point() and p.element_size() > 1}


class _CastInputs:
    """A pre-hook that casts a layer's inputs to the dtype of its gathered parameters."""

    in_plain_module = None  # it is left out of a pickle

    def __init__(self, device: str) -> None:
        self.device = device
        self.cast: list[bool] = []  # one entry for each running forward, the innermost last

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if torch.is_autocast_enabled(self.device):
            self.cast.append(False)
            return None
        self.cast.append(True)
        dtype = min((p.dtype for p in _castable(module).values()), key=lambda dtype: dtype.itemsize)
        return cast(args, dtype), cast(kwargs, dtype)


class _CastBack:
    """A forward hook that casts outputs back, also after an exception."""

    in_plain_module = None

    def __init__(self, before: _CastInputs, stored: torch.dtype) -> None:
        self.before, self.stored = before, stored

    def __call__(self, module: nn.Module, args: Any, output: Any) -> Any:
        was_cast = self.before.cast.pop() if self.before.cast else False
        return cast_outputs(output, self.stored) if was_cast and output is not None else None
