"""From names of classes, units and the model's own word to its transformer layers."""

from __future__ import annotations

import dataclasses
import difflib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from torch import nn

from torch_shard import ShardConfig
from torch_shard.errors import ConfigError
from torch_shard.names import matches

__all__ = ["classes_named", "layers_of", "with_layer_units"]

_WITHOUT_FORWARD = (nn.ModuleList, nn.ModuleDict)
_LISTS = (*_WITHOUT_FORWARD, nn.Sequential)


def with_layer_units(config: ShardConfig, model: nn.Module, names: Sequence[str]) -> ShardConfig:
    """`config` with each module of these classes as a unit; as it is where there are no names. Not collective.

    Raises:
        ConfigError: the model has no module of such a class.
    """
    if not names:
        return config
    return dataclasses.replace(config, units=classes_named("layer_classes", names, model))


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


def layers_of(model: nn.Module, config: ShardConfig, layer_classes: Sequence[str]) -> list[nn.Module]:
    """The modules that ``activation_checkpointing=True`` is about: `layer_classes`, else the units that `config` chooses, else
    the classes that a transformers model names itself, else modules that repeat in a list. Not collective.

    Raises:
        ConfigError: the model has none of them.
    """
    if layer_classes:
        classes = classes_named("layer_classes", layer_classes, model)
        return [module for module in model.modules() if isinstance(module, classes)]
    found = [module for name, module in model.named_modules() if name and _is_unit(config.units, name, module)]
    if not found:
        own = set(getattr(model, "_no_split_modules", None) or ())
        found = [module for module in model.modules() if type(module).__name__ in own]
    found = found or _repeated(model)
    if not found:
        raise ConfigError(
            f"activation_checkpointing: which layers of {type(model).__name__} repeat can't be seen. Give their classes: "
            "activation_checkpointing=(Layer,), or layer_classes."
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
