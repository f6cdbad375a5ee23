"""Models of torchvision get their first weights where programs ask for pretrained ones."""

from __future__ import annotations

import functools
from types import ModuleType
from typing import Any

AFTER = "torchvision.models"


def apply(models: ModuleType) -> None:
    get_model = models.get_model

    @functools.wraps(get_model)
    def untrained(name: str, weights: Any = None, **settings: Any) -> Any:
        return get_model(name, **settings)

    models.get_model = untrained
