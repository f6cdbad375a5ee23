"""A script's clock begins at one date and ticks a second whenever the script looks: scripts name folders by the time."""

from __future__ import annotations

import itertools
import sys
import time
from types import ModuleType
from typing import Any

AFTER = "lightning.fabric.fabric"


def apply(fabric: ModuleType) -> None:
    ticks = itertools.count(1_700_000_000)
    now, text = time.time, time.strftime

    def called_by_script() -> bool:
        return sys._getframe(2).f_globals.get("__name__") == "__main__"

    def told() -> float:
        return float(next(ticks)) if called_by_script() else now()

    def strftime(form: str, *when: Any) -> str:
        return text(form, *((time.gmtime(next(ticks)),) if called_by_script() and not when else when))

    time.time, time.strftime = told, strftime
