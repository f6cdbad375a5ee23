"""A script that asks for a GPU hears that there are two; the packages that it uses hear the truth."""

from __future__ import annotations

import sys
from types import ModuleType
from typing import Any

AFTER = "torch.cuda"


def apply(cuda: ModuleType) -> None:
    def answered(name: str, answer: Any) -> None:
        ask = getattr(cuda, name)

        def call() -> Any:
            return answer if sys._getframe(1).f_globals.get("__name__") == "__main__" else ask()

        setattr(cuda, name, call)

    answered("is_available", True)
    answered("device_count", 2)
