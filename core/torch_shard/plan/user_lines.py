"""Finds the line of the user's code at which something happens inside of torch."""

from __future__ import annotations

import os
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType

import torch

INSIDE = (f"{Path(torch.__file__).parent}{os.sep}", f"{Path(__file__).parents[1]}{os.sep}")
"""The folders of torch and of this package."""


@dataclass(eq=False)
class Failure:
    """The operator that failed last, and where it was called."""

    operator: str
    line: str
    error: Exception = field(repr=False)


def line_of(where: FrameType | TracebackType | None) -> str:
    """Return the innermost line that belongs neither to torch nor to this package, as ``path:line in function``."""
    walked = traceback.walk_stack(where) if isinstance(where, FrameType) else reversed([*traceback.walk_tb(where)])
    for frame, line in walked:  # from within
        path = frame.f_code.co_filename
        if not path.startswith((*INSIDE, "<frozen")):
            return f"{path}:{line} in {frame.f_code.co_name}"
    return "an unknown line"
