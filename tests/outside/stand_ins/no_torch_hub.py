"""No repository of torch.hub has models: programs name them on their command lines, which the network would be asked for."""

from __future__ import annotations

from types import ModuleType
from typing import Any

AFTER = "torch.hub"


def apply(hub: ModuleType) -> None:
    def no_models(*_: Any, **__: Any) -> list[str]:
        return []

    hub.list = no_models
