"""Patterns of dotted names, as settings have them."""

from __future__ import annotations

import fnmatch
import re

from ..errors import ConfigError

__all__ = ["check_pattern", "matches", "without_wrappers"]


def check_pattern(field: str, pattern: str) -> None:
    """Raise for a pattern that is none. Not collective."""
    if not pattern:
        raise ConfigError(f"{field} must not be an empty pattern.")
    if pattern.startswith("re:"):
        try:
            re.compile(pattern[3:])
        except re.error as error:
            raise ConfigError(f"{field} is not a regular expression ({error}): {pattern!r}.") from None


def without_wrappers(name: str) -> str:
    """A parameter's name as state dicts have it, in which torch's checkpoint wrapper leaves no trace. Not collective."""
    return name.replace("_checkpoint_wrapped_module.", "")


def matches(name: str, pattern: str) -> bool:
    """Return whether a dotted name matches a glob, or with the prefix ``re:`` a regular expression.

    Both must match the whole name. Not collective.
    """
    if pattern.startswith("re:"):
        return re.fullmatch(pattern[3:], name) is not None
    return fnmatch.fnmatchcase(name, pattern)
