"""From names of classes, units and the model's own word to the layers of a model."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch import nn

from ..config.shard_config import Units
from ..errors import ConfigError
from ..utils.patterns import matches

__all__ = ["classes_named", "repeated_layers"]

_WITHOUT_FORWARD = (nn.ModuleList, nn.ModuleDict)
_LISTS = (*_WITHOUT_FORWARD, nn.Sequential)


def classes_named(setting: str, names: Iterable[str], model: nn.Module) -> tuple[type[nn.Module], ...]:
    """The classes of modules in `model` that have these names. Not collective.

    Raises:
        ConfigError: there is none; names `setting`, and classes that there are.
    """
    there = {type(module).__name__: type(module) for module in model.modules()}
    for name in names:
        if name not in there:
            close = difflib.get_close_matches(name, there, n=3)
            repeated = ", ".join(close or sorted({type(m).__name__ for m in _repeated(model)})[:5])
            hint = f" There is {repeated}." if repeated else ""
            raise ConfigError(f"{setting}: {type(model).__name__} has no module of class {name!r}.{hint}")
    return tuple(there[name] for name in dict.fromkeys(names))


def repeated_layers(setting: str, model: nn.Module, units: Units) -> list[nn.Module]:
    """The modules that `units` chooses, else those of the classes that a transformers model names itself, else modules that
    repeat in a list. Not collective.

    Raises:
        ConfigError: the model has none of them; names `setting`.
    """
    found = [module for name, module in model.named_modules() if name and _is_unit(units, name, module)]
    if not found:
        own = set(getattr(model, "_no_split_modules", None) or ())
        found = [module for module in model.modules() if type(module).__name__ in own]
    found = found or _repeated(model)
    if not found:
        raise ConfigError(
            f"{setting}: which layers of {type(model).__name__} repeat can't be seen. Give their classes: {setting}=(Layer,)."
        )
    return found


def _is_unit(units: Any, name: str, module: nn.Module) -> bool:
    if units is None:
        return False
    if callable(units):
        return bool(units(name, module))
    return any(
        isinstance(module, entry) if isinstance(entry, type) else isinstance(entry, str) and matches(name, entry)
        for entry in units
    )


def _repeated(model: nn.Module) -> list[nn.Module]:
    """Modules of one class, at least two in a list or a Sequential, that consist of others and are in no such module."""
    children = list(model.children())
    kinds = Counter(type(child) for child in children) if isinstance(model, _LISTS) else Counter()
    found: list[nn.Module] = []
    for child in children:
        if kinds[type(child)] > 1 and not isinstance(child, _WITHOUT_FORWARD) and next(child.children(), None):
            found.append(child)
        else:
            found += _repeated(child)
    return found
