"""Tied weights: which tensors are one, and where a format has one name for each, which one is kept."""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Sequence

import torch
from torch import nn

__all__ = ["chosen_names", "memory_key"]


def memory_key(tensor: torch.Tensor) -> Hashable:
    """Return a key that is equal for dense tensors that are the same values in the same memory, as long as both live."""
    # A view by conj() or imag may have the memory, shape and strides of its base, and other values.
    kind = (tensor.dtype, tensor.is_conj(), tensor.is_neg())
    return tensor.data_ptr(), tensor.device, tuple(tensor.shape), tensor.stride(), kind


def chosen_names(model: nn.Module, groups: Iterable[Sequence[str]]) -> list[str]:
    """Return for each group of names of one tensor the name that is stored. Not collective.

    transformers' models say which names go, by ``_tied_weights_keys``: names or patterns in a list, or as the keys of a dict,
    within the module that has it. Else, or where all would go, the first name stays.
    """
    patterns = []
    for prefix, module in model.named_modules():
        keys = getattr(module, "_tied_weights_keys", None)
        for key in keys if isinstance(keys, (list, tuple, set, dict)) else ():
            patterns.append((f"{prefix}." if prefix else "", re.compile(str(key))))

    def goes(name: str) -> bool:
        return any(name.startswith(prefix) and found.search(name[len(prefix) :]) for prefix, found in patterns)

    return [next((name for name in names if not goes(name)), names[0]) for names in groups]
