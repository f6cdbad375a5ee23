"""Fabric's DDPStrategy in place of FSDPStrategy and ModelParallelStrategy: for the run under DDP alone.

The first needs a GPU, and both shard. As they do, it makes a model of ``init_module(empty_init=True)`` on the device meta and
calls the modules' ``reset_parameters`` later. DDPStrategy would leave its parameters without values.
"""

from __future__ import annotations

from types import ModuleType
from typing import Any

AFTER = "lightning.fabric.strategies"


def apply(strategies: ModuleType) -> None:
    import torch
    from lightning.fabric.utilities.init import _materialize_distributed_module

    class OnMeta(strategies.DDPStrategy):  # type: ignore[name-defined, misc]
        def module_init_context(self, empty_init: bool | None = None) -> Any:
            return torch.device("meta") if empty_init else super().module_init_context(empty_init)

        def module_to_device(self, module: Any) -> None:  # Fabric.setup calls it first
            _materialize_distributed_module(module, self.root_device)
            super().module_to_device(module)

    def named(name: str) -> type:
        def __new__(cls: type, *args: Any, **kwargs: Any) -> Any:
            return OnMeta()

        return type(name, (), {"__new__": __new__})  # a class: programs ask with isinstance, and the answer is no

    for name in ("FSDPStrategy", "ModelParallelStrategy"):
        setattr(strategies, name, named(name))
