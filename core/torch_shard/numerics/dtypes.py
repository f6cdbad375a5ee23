"""The floating-point dtypes that the engine casts between, and which of them hold all values of another."""

from __future__ import annotations

import torch

FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def widens(narrow: torch.dtype, wide: torch.dtype) -> bool:
    """Return True if `wide` has more bytes than `narrow` and all of its values."""
    return narrow.itemsize < wide.itemsize and torch.promote_types(narrow, wide) == wide
