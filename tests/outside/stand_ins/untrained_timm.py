"""Models of timm get their first weights where programs ask for pretrained ones."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

AFTER = "timm"


def apply(timm: ModuleType) -> None:
    create_model = timm.create_model

    @functools.wraps(create_model)
    def untrained(name: str, pretrained: bool = False, **settings: Any) -> Any:
        return create_model(name, **settings)

    timm.create_model = untrained
