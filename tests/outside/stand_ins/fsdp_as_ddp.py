"""Fabric's DDPStrategy in place of strategies that need a GPU, or that shard: for the run under DDP alone."""

from __future__ import annotations

from types import ModuleType
from typing import Any

AFTER = "lightning.fabric.strategies"


def apply(strategies: ModuleType) -> None:
    def named(name: str) -> type:
        def __new__(cls: type, *args: Any, **kwargs: Any) -> Any:
            return strategies.DDPStrategy()

        return type(name, (), {"__new__": __new__})  # a class: programs ask with isinstance, and the answer is no

    for name in ("FSDPStrategy", "ModelParallelStrategy"):
        setattr(strategies, name, named(name))
