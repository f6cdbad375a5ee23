"""Finds the line of the user's code at which something happens inside of torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType, TracebackType

import torch

INSIDE = (str(Path(torch.__file__).parent), str(Path(__file__).parents[1]))
"""The folders of torch and of this package."""


@dataclass(eq=False)
class Failure:
    """The operator that failed last, and where it was called."""

    operator: str
    line: str
    error: Exception = field(repr=False)


def line_of(where: FrameType | TracebackType | None) -> str:
    """Return the innermost line that belongs neither to torch nor to this package, as ``path:line in function``."""
    found = "an unknown line"
    while where is not None:
        frame = where.tb_frame if isinstance(where, TracebackType) else where
        line = where.tb_lineno if isinstance(where, TracebackType) else where.f_lineno
        path = frame.f_code.co_filename
        if not path.startswith((*INSIDE, "<frozen")):
            found = f"{path}:{line} in {frame.f_code.co_name}"
            if not isinstance(where, TracebackType):
                break  # frames are read from within, tracebacks from without
        where = where.tb_next if isinstance(where, TracebackType) else where.f_back
    return found
