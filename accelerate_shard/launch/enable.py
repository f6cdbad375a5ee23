"""``enable()``: replace Accelerate's ``Accelerator`` by ours wherever it is known by name, for scripts that are not edited.

Names are replaced in the modules that are loaded. Modules that are loaded later import our class from ``accelerate``.
"""

from __future__ import annotations

import importlib.machinery
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

from torch_shard import ShardConfig
from torch_shard.frontend import write_full_safetensors
from torch_shard.frontend.launch import Replaced, replace_everywhere

from ..settings.from_environment import launch_plugin, take_over_launch
from ..settings.plugin import ShardPlugin, plugin_of
from ..settings.resolve import set_enabled_plugin

_TRAINER = "transformers.trainer"
_LIBRARIES = ("accelerate", "transformers", "trl", "peft")

_replaced: Replaced = []


def enable(plugin: ShardPlugin | ShardConfig | None = None) -> None:
    """Make ``accelerate.Accelerator`` ours from now on, and make ``transformers.Trainer`` train with it. Not collective.

    For scripts and notebooks that are left as they are: call it first, before or after ``from accelerate import Accelerator``.
    Accelerators that exist already are not changed. Calling it again replaces the settings.

    Args:
        plugin: settings of every Accelerator that is given none, in place of those of the launch.

    Raises:
        ConfigError: `plugin` is neither a :class:`ShardPlugin` nor a ``ShardConfig``; or the launch's settings are wrong.
    """
    checked = None if plugin is None else plugin_of(plugin)
    if checked is None:
        launch_plugin()  # so that a mistake shows here and not after the script has loaded its model
    _replaced.extend(replace_everywhere(_stock(), _ours(), ["accelerate_shard"]))  # our modules need the original
    write_full_safetensors()  # here, too, since scripts import its functions before they make an Accelerator
    set_enabled_plugin(checked)
    take_over_launch()
    _FINDER.install()


def disable() -> None:
    """Undo :func:`enable`, and restore all names. Accelerators that exist stay as they are. Not collective.

    A module of the user's that was loaded in between keeps ours, which it may have imported from here.
    """
    set_enabled_plugin(None)
    _FINDER.remove()
    ours = _ours()
    for module, name, before in [*_replaced, *_imported_since(ours)]:
        if module.__dict__.get(name) is ours:
            setattr(module, name, before)
    _replaced.clear()
    if _TRAINER in sys.modules:
        from ..trainer.mixin import remove_from_trainer

        remove_from_trainer()


def _ours() -> Any:
    from ..accelerator import Accelerator

    return Accelerator


def _stock() -> Any:
    # Found through our class, since the name in `accelerate` may be ours by now.
    return next(kind for kind in _ours().__mro__ if kind.__module__ == "accelerate.accelerator")


def _imported_since(ours: Any) -> Replaced:
    """Return the places where libraries have imported our class by the name of Accelerate's."""
    modules = [m for name, m in list(sys.modules.items()) if name.split(".")[0] in _LIBRARIES and _replaced]
    return [
        (module, name, _stock())
        for module in modules
        for name, value in list(getattr(module, "__dict__", {}).items())
        if value is ours
    ]


def _apply_to_trainer(module: ModuleType) -> None:
    from ..trainer.mixin import apply_to_trainer

    apply_to_trainer()


class Finder:
    """An import finder that leaves a module to the other finders, and calls a function with it once it has been executed."""

    def __init__(self, name: str, then: Callable[[ModuleType], None]) -> None:
        self.name, self.then = name, then

    def install(self) -> None:
        """Put this finder before the others. If the module has been imported already, call the function now, each time."""
        if self not in sys.meta_path:
            sys.meta_path.insert(0, self)  # type: ignore[arg-type]
        if self.name in sys.modules:
            self.then(sys.modules[self.name])

    def remove(self) -> None:
        if self in sys.meta_path:
            sys.meta_path.remove(self)  # type: ignore[arg-type]

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        if fullname != self.name:
            return None
        for finder in sys.meta_path:
            find = getattr(finder, "find_spec", None)
            spec: importlib.machinery.ModuleSpec | None = (
                find(fullname, path, target) if find and finder is not self else None
            )
            if spec is not None:
                self._follow(spec)
                return spec
        return None

    def _follow(self, spec: importlib.machinery.ModuleSpec) -> None:
        loader: Any = spec.loader
        execute: Callable[[ModuleType], None] = loader.exec_module

        def exec_module(module: ModuleType) -> None:
            execute(module)
            if module.__name__ == self.name and self in sys.meta_path:
                # The module is complete but for the import machinery's bookkeeping, which nothing here needs.
                self.then(module)

        loader.exec_module = exec_module


_FINDER = Finder(_TRAINER, _apply_to_trainer)
