"""All cases of all parts, in their order. The parent and the ranks make the same list."""

from __future__ import annotations

from .context import Case, Setting
from .correctness import correctness_cases, stream_cases
from .memory import memory_cases
from .results import PARTS
from .speed import offload_cases, speed_cases


def cases_of(part: str, setting: Setting) -> list[Case]:
    """Return the cases of a part, those that are skipped included. Not collective."""
    makers = (correctness_cases, stream_cases, memory_cases, speed_cases, offload_cases)
    return dict(zip(PARTS, makers, strict=True))[part](setting)
