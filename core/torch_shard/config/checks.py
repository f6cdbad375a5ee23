"""Checks of single settings, with errors that begin with the setting's name."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Set
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


def check_number(field: str, value: Any, unit: str, positive: bool = True) -> None:
    """Raise a ConfigError unless `value` is a finite number above 0, or at least 0 where it need not be `positive`."""
    number = value if isinstance(value, (int, float)) and not isinstance(value, bool) else math.nan
    if not 0 <= number < math.inf or (positive and not number):
        kind = "positive" if positive else "non-negative"
        raise ConfigError(f"{field} must be a {kind}, finite number of {unit}, not {value!r}.")


def checked_entries(field: str, value: Any, wanted: str) -> tuple[Any, ...]:
    """Return a setting that is a sequence as a tuple.

    Raises:
        ConfigError: `value` is no sequence. A set has another order on every rank; a str and a Module can be iterated over, but
            are given by mistake only.
    """
    if isinstance(value, (str, type, Set, Mapping, nn.Module, nn.Parameter)) or not isinstance(value, Iterable):
        given = repr(value) if isinstance(value, (str, type)) else type(value).__name__
        raise ConfigError(f"{field} must be {wanted}, not {given}.")
    return tuple(value)


def checked_modules(field: str, value: Any) -> tuple[Any, ...]:
    """Return a setting that chooses modules as a tuple of module classes and patterns of module names.

    Raises:
        ConfigError: `value` is not a sequence of these.
    """
    entries = checked_entries(field, value, "a sequence of module classes and patterns of names")
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
