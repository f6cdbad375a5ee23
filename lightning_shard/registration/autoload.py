"""Registration of the strategy's names in Lightning without an import in user code.

torch calls :func:`install` at the end of ``import torch`` (the entry point group ``torch.backends``). Lightning has no
entry points for strategies, so all that happens there is that an import finder is put in front. It waits for the
modules that hold Lightning's registries and, once one of them has been executed, adds our names to it.

This file imports nothing of torch and nothing of Lightning, and no exception leaves it: either would break
``import torch`` for everybody who has this package installed.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Collection
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

# The modules whose execution completes a registry of strategies: the registry's name in it, and the namespace.
_REGISTRIES = {
    "lightning.pytorch.strategies": ("StrategyRegistry", "lightning"),
    "pytorch_lightning.strategies": ("StrategyRegistry", "pytorch_lightning"),
    "lightning.fabric.strategies": ("STRATEGY_REGISTRY", "lightning.fabric"),
    "lightning_fabric.strategies": ("STRATEGY_REGISTRY", "lightning_fabric"),
}


class AfterImport:
    """An import finder that leaves some modules to the other finders, and calls a function with each once it has been executed.

    The modules keep the loader and source that they would have without it.
    """

    def __init__(self, names: Collection[str], then: Callable[[ModuleType], None]) -> None:
        self.names, self.then = names, then
        self._executed: set[str] = set()  # the modules that are being executed

    def install(self) -> None:
        """Put this finder before the others, and call the function at once for modules that are imported already. Idempotent."""
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)  # type: ignore[arg-type]
            for module in map(sys.modules.get, self.names):
                if module is not None and not getattr(module.__spec__, "_initializing", False):
                    self.then(module)

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        if fullname not in self.names:
            return None
        try:
            return self._watched(fullname, path, target)
        except Exception:  # the finders after this one then import the module as if we were not here
            return None

    def _watched(self, fullname: str, path: Any, target: Any) -> ModuleSpec | None:
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = find(fullname, path, target) if find and finder is not self else None
            if spec is not None:
                self._follow(spec)
                return spec
        return None

    def _follow(self, spec: ModuleSpec) -> None:
        loader: Any = spec.loader
        execute = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            name = module.__name__
            # Another finder that asks all finders itself, as wrapt's does, gets a loader that calls this function twice.
            nested = name in self._executed
            self._executed.add(name)
            try:
                execute(module)
            finally:
                if not nested:
                    self._executed.remove(name)
            # Some loaders (zipimport's) serve several modules.
            if name in self.names and not nested:
                self.then(module)

        loader.exec_module = exec_module


def _register(module: ModuleType) -> None:
    try:
        from . import registry as names

        registry, namespace = _REGISTRIES[module.__name__]
        names.register(namespace, getattr(module, registry))
    except Exception as error:
        import logging

        fabric = "fabric" in getattr(module, "__name__", "")
        logging.getLogger("torch_shard").warning(
            "strategy='shard' could not be registered in %s (%r); pass strategy=lightning_shard.%s().",
            getattr(module, "__name__", module),
            error,
            "ShardFabricStrategy" if fabric else "ShardStrategy",
        )


_FINDER = AfterImport(_REGISTRIES, _register)


def install() -> None:
    """Register the names in imported modules of Lightning, and in others at their import. Idempotent. Never raises."""
    # There is no good place for a message this early. After a failure `strategy="shard"` is an unknown name to Lightning.
    with contextlib.suppress(Exception):
        _FINDER.install()
