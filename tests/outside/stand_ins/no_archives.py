"""Archives that a program downloads have been unpacked already."""

from __future__ import annotations

from types import ModuleType
from typing import Any

AFTER = "torchvision.datasets.utils"


def apply(utils: ModuleType) -> None:
    def nothing(*_: Any, **__: Any) -> None:
        pass

    utils.download_and_extract_archive = nothing
