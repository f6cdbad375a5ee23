"""What dtypes in a checkpoint do not fit the live model and optimizers, and a hint for the error that lists everything."""

from __future__ import annotations

from typing import Any

import torch

from ..errors import ConfigError

OF_THIS = " It must be a checkpoint of this model and these optimizers."
"""The hint of :meth:`~..state.model_state.Mismatches.refuse` for a checkpoint."""


def check_dtype(dtype: Any) -> None:
    """Raise if the dtype that models are to be converted to is neither None nor a floating-point dtype."""
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ConfigError(f"dtype must be a floating-point torch.dtype or None, not {dtype!r}.")


def wrong_dtype(name: str, saved: torch.dtype, live: Any, asked: torch.dtype | None, where: str) -> list[str]:
    """Return what is wrong with an entry's dtype: nothing if the live tensor has it, or `asked` is the live tensor's."""
    if not isinstance(live, torch.Tensor) or saved == live.dtype:
        return []
    both = saved.is_floating_point and live.is_floating_point()
    if both and asked == live.dtype:
        return []
    hint = f"; pass dtype={live.dtype} to convert it" if both else ""
    return [f"{name} is {saved} in the {where} and {live.dtype} here{hint}"]
