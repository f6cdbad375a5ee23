"""Which parameters torch.autocast casts: the operands of matrix products and convolutions.

Every other use of a parameter computes with it as it is stored: an embedding, a norm, ``x * self.gate``, ``x + self.positions``.
What a forward does with its parameters is not known before it runs. The module's class decides, and where that is unknown the
parameter's size. A parameter that is left in fp32 by mistake costs only bytes, because autocast casts it when it is used. So of
unknown modules only large parameters are cast.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import nn
from torch.nn.utils.parametrize import ParametrizationList

_WITH_WEIGHT_AND_BIAS = (nn.Linear, nn.modules.conv._ConvNd)
_WHOLLY = (nn.RNNBase, nn.MultiheadAttention)
_NEVER = (nn.Embedding, nn.EmbeddingBag, ParametrizationList)
_LARGE, _NARROW = 1 << 20, 64


def is_cast(module: nn.Module, name: str, param: torch.Tensor) -> bool:
    """Return True if autocast casts the parameter that `module` holds as its attribute `name`. Not collective.

    These are the weights and biases of linear and convolutional layers, with transformers' ``Conv1D`` among them, and all
    parameters of torch's recurrent and attention layers. Of other modules, embeddings and parametrizations excepted, these are
    parameters of at least 2**20 elements whose last two dimensions are both at least 64, such as the stacked weights of experts.

    Args:
        module: a module, sharded or not.
        name: the attribute's name.
        param: the parameter.
    """
    if _is_known(module):
        return isinstance(module, _WHOLLY) or name in ("weight", "bias")  # a subclass may have others, such as a gate
    return is_cast_by_size(module, param.shape)


def is_cast_by_size(module: nn.Module, shape: Sequence[int]) -> bool:
    """Return True if a parameter of `module` counts as cast for its shape alone. Not collective."""
    large = len(shape) > 1 and math.prod(shape) >= _LARGE and min(shape[-2:]) >= _NARROW
    return large and not _is_known(module) and not isinstance(module, _NEVER)


def _is_known(module: nn.Module) -> bool:
    return isinstance(module, (*_WHOLLY, *_WITH_WEIGHT_AND_BIAS)) or type(module).__name__ == "Conv1D"
