"""Parameters as modules hold them: the user's attributes on parameters, and what RNN modules keep beside them."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ..shard_tensor.state import OWN_ATTRIBUTES
from ..shard_tensor.tensor import ShardTensor


def adopt(param: Any, original: Any) -> None:
    """Make `param` an nn.Parameter with the Python attributes and requires_grad of `original`."""
    with torch._C.DisableTorchFunctionSubclass():
        param._is_param = True
        param.requires_grad_(original.requires_grad)
        if isinstance(original, ShardTensor) and original.grad_dtype != original.dtype:
            param.grad_dtype = original.grad_dtype
    copy_attributes(original, param)


def copy_attributes(param: torch.Tensor, other: torch.Tensor) -> None:
    """Give `other` the Python attributes that the user has given to `param`."""
    for key, value in param.__dict__.items():
        if key not in OWN_ATTRIBUTES:
            other.__dict__[key] = value


def held_by(param: Any, rnns: Iterable[nn.Module]) -> str | None:
    """Return why a parameter can't be swapped, and the remedy, to be read behind its name; None if it can be.

    Args:
        param: the parameter, sharded or plain.
        rnns: modules of the model; the weak references that RNNs among them keep don't count, since these can be made anew.
    """
    own = {id(ref) for module in rnns for ref in getattr(module, "_flat_weight_refs", ())}
    if any(id(ref) not in own for ref in weakref.getweakrefs(param)):
        return "has weak references to it, which would break; drop them first."
    with torch._C.DisableTorchFunctionSubclass():
        if param._use_count() > 1:
            return "is still held by an autograd graph or by C++ code; drop old losses and outputs (del loss) first."
    return None


def rebuild_flat_weights(module: nn.RNNBase) -> None:
    """Make an RNN module read the parameters that it holds now."""
    # RNNBase.forward reads `_flat_weights`, not `_parameters`. Its weak references would also block a later swap_tensors.
    module._flat_weights = [getattr(module, n, None) for n in module._flat_weights_names]
    module._flat_weight_refs = [None] * len(module._flat_weights_names)
