"""A key by which tensors over the same memory, with the same values, are recognised."""

from __future__ import annotations

from collections.abc import Hashable

import torch


def memory_key(tensor: torch.Tensor) -> Hashable:
    """Return a key that is equal for dense tensors that have the same values in the same memory, as long as both live."""
    # A view by conj() or imag may have the memory, shape and strides of its base, and other values.
    kind = (tensor.dtype, tensor.is_conj(), tensor.is_neg())
    return tensor.data_ptr(), tensor.device, tuple(tensor.shape), tensor.stride(), kind
