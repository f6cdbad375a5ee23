"""Dotted names of modules and parameters, and the patterns by which settings choose them."""

from __future__ import annotations

import fnmatch
import re
from collections import Counter
from collections.abc import Iterator

from torch import nn

from ..errors import ConfigError

MOST_NAMES = 1000
"""The most names that are considered of one module, which may be registered in many places."""


def check_pattern(field: str, pattern: str) -> None:
    """Raise a :class:`ConfigError` if `pattern` is empty, or not a valid regular expression. Not collective."""
    if not pattern:
        raise ConfigError(f"{field} must not be an empty pattern.")
    if pattern.startswith("re:"):
        try:
            re.compile(pattern[3:])
        except re.error as error:
            raise ConfigError(f"{field} is not a regular expression ({error}): {pattern!r}.") from None


def without_wrappers(name: str) -> str:
    """Return a parameter's name as state dicts have it, without the part of torch's checkpoint wrapper. Not collective."""
    return name.replace("_checkpoint_wrapped_module.", "")


def matches(name: str, pattern: str) -> bool:
    """Return True if a dotted name matches a glob, or with the prefix ``re:`` a regular expression.

    The pattern must match the full name. Not collective.
    """
    if pattern.startswith("re:"):
        return re.fullmatch(pattern[3:], name) is not None
    return fnmatch.fnmatchcase(name, pattern)


def every_name(root: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Yield each name of each module below `root`, and the module, in the order of registration.

    The order is that of ``root.named_modules(remove_duplicate=False)``. A module has at most :data:`MOST_NAMES` names, because
    where each module holds the next one twice, the names double at every level. A module below itself is not entered again.
    """
    seen: Counter[int] = Counter()
    path: list[nn.Module] = []

    def walk(module: nn.Module, name: str) -> Iterator[tuple[str, nn.Module]]:
        seen[id(module)] += 1
        yield name, module
        path.append(module)
        for attribute, child in module._modules.items():
            # A module with that many names has given as many to all modules below it.
            if child is None or seen[id(child)] == MOST_NAMES or any(child is above for above in path):
                continue
            yield from walk(child, f"{name}.{attribute}" if name else attribute)
        path.pop()

    return walk(root, "")
