"""The states of a unit; the docstring of ``unit/unit.py`` says how it passes from one to the next."""

from __future__ import annotations

import enum


class State(enum.Enum):
    """The state of a unit."""

    SHARDED = "sharded"
    GATHERING = "gathering"
    FULL = "full"
    SUMMONED = "summoned"  # inside engine.gathered: the modules hold full parameters outside forwards

    def __init__(self, text: str) -> None:
        self.is_summoned = text == "summoned"
