"""Checks of single settings, with errors that begin with the setting's name."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn

from ..errors import ConfigError
from ..utils.patterns import check_pattern, every_name, matches


def check_bools(settings: Any, *fields: str, prefix: str = "") -> None:
    """Raise a ConfigError unless these fields of `settings` are True or False."""
    for field in fields:
        if not isinstance(getattr(settings, field), bool):
            raise ConfigError(f"{prefix}{field} must be True or False, not {getattr(settings, field)!r}.")


def check_int(field: str, value: Any, least: int) -> None:
    """Raise a ConfigError unless `value` is an integer of at least `least`."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise ConfigError(f"{field} must be an integer of at least {least}, not {value!r}.")


def check_seconds(field: str, value: Any) -> None:
    """Raise a ConfigError unless `value` is a positive, finite number."""
    seconds = value if isinstance(value, (int, float)) else math.nan
    if isinstance(value, bool) or not 0 < seconds < math.inf:
        raise ConfigError(f"{field} must be a positive, finite number of seconds, not {value!r}.")


def checked_modules(field: str, value: Any) -> tuple[Any, ...]:
    """Return a setting that chooses modules as a tuple of module classes and patterns of module names.

    Raises:
        ConfigError: `value` is not a sequence of these.
    """
    if isinstance(value, (str, type, nn.Module, Mapping)) or not isinstance(value, Iterable):
        raise ConfigError(f"{field} must be a sequence of module classes and patterns of names, not {value!r}.")
    entries = tuple(value)
    for index, entry in enumerate(entries):
        if isinstance(entry, str):
            check_pattern(f"{field}[{index}]", entry)
        elif not (isinstance(entry, type) and issubclass(entry, nn.Module)):
            raise ConfigError(f"{field}[{index}] must be a module class or a pattern of names, not {entry!r}.")
    return entries


def chooses(entry: Any, name: str, module: nn.Module) -> bool:
    """Return True if a module class or a pattern of module names chooses `module`, which has this name."""
    return matches(name, entry) if isinstance(entry, str) else isinstance(module, entry)


def modules_named(field: str, entries: Iterable[Any], model: nn.Module) -> set[nn.Module]:
    """Return the modules of `model` that classes and patterns of names choose, without their children.

    Raises:
        ConfigError: a pattern matches no module. (A class that the model does not have is no mistake.)
    """
    found: set[nn.Module] = set()
    for index, entry in enumerate(entries):
        own = {m for name, m in every_name(model) if chooses(entry, name, m)}
        if not own and isinstance(entry, str):
            raise ConfigError(f"{field}[{index}]: {entry!r} is the name of no module.")
        found |= own
    return found
