"""One error that lists everything in a checkpoint that does not fit the live model and optimizers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from ..errors import ConfigError, StateDictError
from ..state.model_state import Mismatches

__all__ = ["check_dtype", "refuse_mismatches", "wrong_dtype"]


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


def refuse_mismatches(path: Path, found: Mismatches) -> None:
    """Raise if anything is missing, unexpected or otherwise wrong, with all of it in one error."""
    lines = found.lines()
    if lines:
        raise StateDictError(
            f"{path} does not fit, and nothing was loaded. It must be a checkpoint of this model and these optimizers.\n  "
            + "\n  ".join(lines)
        )
