"""Selects the layers of a model by class names, by the setting `units`, or by the model's own `_no_split_modules`."""

from __future__ import annotations

import difflib
from collections import Counter
from collections.abc import Iterable
from typing import Any

from torch import nn

from ..config.checks import chooses
from ..config.shard_config import Units
from ..errors import ConfigError

_WITHOUT_FORWARD = (nn.ModuleList, nn.ModuleDict)
_LISTS = (*_WITHOUT_FORWARD, nn.Sequential)


def classes_named(setting: str, names: Iterable[str], model: nn.Module) -> tuple[type[nn.Module], ...]:
    """Return the classes of modules in `model` that have these names. Not collective.

    Raises:
        ConfigError: the model has no module of a class with one of the names. The error names `setting`, and similar classes.
    """
    kinds = dict.fromkeys(type(module) for module in model.modules())  # several may have one name
    there = {kind.__name__ for kind in kinds}
    names = list(names)
    for name in names:
        if name not in there:
            close = difflib.get_close_matches(name, there, n=3)
            repeated = ", ".join(close or sorted({type(m).__name__ for m in _repeated(model)})[:5])
            hint = f" There is {repeated}." if repeated else ""
            raise ConfigError(f"{setting}: {type(model).__name__} has no module of class {name!r}.{hint}")
    return tuple(kind for kind in kinds if kind.__name__ in names)


def repeated_layers(setting: str, model: nn.Module, units: Units) -> list[nn.Module]:
    """Return the modules that `units` selects, or else the repeated layers of `model`. Not collective.

    Repeated layers are the modules of the classes that a transformers model names in `_no_split_modules`. If the model names
    none, they are modules that repeat in a list.

    Raises:
        ConfigError: the model has no such modules. The error names `setting`.
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


def outermost(layers: Iterable[nn.Module]) -> list[nn.Module]:
    """Return those of `layers` that are in no other one. What is in a recomputed layer would be computed three times."""
    layers = list(layers)
    inner = {id(module) for layer in layers for module in layer.modules() if module is not layer}
    return [layer for layer in dict.fromkeys(layers) if id(layer) not in inner]


def _is_unit(units: Any, name: str, module: nn.Module) -> bool:
    if callable(units):
        return bool(units(name, module))
    return any(chooses(entry, name, module) for entry in units or () if isinstance(entry, (str, type)))


def _repeated(model: nn.Module) -> list[nn.Module]:
    """Return the outermost modules that have children and are in a list or a Sequential with another module of their class."""
    children = list(model.children())
    kinds = Counter(type(child) for child in children) if isinstance(model, _LISTS) else Counter()
    found: list[nn.Module] = []
    for child in children:
        if kinds[type(child)] > 1 and not isinstance(child, _WITHOUT_FORWARD) and next(child.children(), None):
            found.append(child)
        else:
            found += _repeated(child)
    return found
