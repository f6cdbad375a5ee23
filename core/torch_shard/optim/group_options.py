"""One group's options (``lr`` and the like), of which several steps in turn shall each begin with the same.

A class may count in its groups (``group["step"] += 1``); what it counts is counted once, however many steps one of the
user's is divided into.
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["Options", "Snapshot", "copied", "put"]

_OF_PARAMETERS = frozenset({"params", "param_names"})  # entries with an element for each parameter
_MUTABLE = (torch.Tensor, list, tuple, dict, set)


class Snapshot:
    """The options of a group as they are now, to tell later which have changed."""

    def __init__(self, group: dict[str, Any]) -> None:
        self.group = group
        self._before = {key: value for key, value in group.items() if key not in _OF_PARAMETERS}
        self._marks = {key: _mark(value) for key, value in self._before.items() if isinstance(value, _MUTABLE)}

    def changes(self) -> dict[str, Any]:
        """Return the options that were set or changed since."""
        return {
            key: value for key, value in self.group.items() if key not in _OF_PARAMETERS and self._is_new(key, value)
        }

    def _is_new(self, key: str, value: Any) -> bool:
        if key not in self._before or self._before[key] is not value:
            return True
        if isinstance(value, torch.Tensor):
            return bool(value._version != self._marks[key])  # to compare values would be to wait for the device
        return key in self._marks and not _equal(value, self._marks[key])


class Options:
    """What the steps of one of the user's groups begin with, and what becomes of it."""

    def __init__(self, group: dict[str, Any]) -> None:
        self.group = group
        self._before = {key: copied(value) for key, value in group.items() if key not in _OF_PARAMETERS}
        self._made: dict[str, Any] = {}
        self._left = Snapshot({})  # the user's group, behind the steps

    def fresh(self) -> Snapshot:
        """Return a group for one step; its values are its own."""
        return Snapshot(self._with({}))

    def again(self) -> Snapshot:
        """Return a group for one more step, behind :meth:`write_back`: it begins as the others did, but for what has been edited
        since."""
        return Snapshot(self._with(self._left.changes()))

    def _with(self, edited: dict[str, Any]) -> dict[str, Any]:
        group = {key: value for key, value in self.group.items() if key in _OF_PARAMETERS}
        group.update((key, copied(value)) for key, value in {**self._before, **edited}.items())
        return group

    def stepped(self, given: Snapshot) -> None:
        """Note what a step has made of the options that it was given."""
        self._made.update(given.changes())

    def write_back(self) -> None:
        """Put what the steps have made of the options into the user's group."""
        for key, value in self._made.items():
            put(self.group, key, value)
        self._made = {}
        self._left = Snapshot(self.group)


def copied(value: Any) -> Any:
    """Return a copy, so that what is changed in place within `value` stays as it is there."""
    if not isinstance(value, _MUTABLE):
        return value
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if type(value) is dict:
        return {key: copied(child) for key, child in value.items()}
    if type(value) in (list, tuple):
        return type(value)(map(copied, value))
    return set(value) if type(value) is set else value


def put(group: dict[str, Any], key: str, value: Any) -> None:
    """Set an option, in the tensor that is there if there is one."""
    held = group.get(key)
    if isinstance(held, torch.Tensor) and isinstance(value, torch.Tensor) and held.shape == value.shape:
        with torch.no_grad():
            held.copy_(value)
    else:
        group[key] = copied(value)


def _mark(value: Any) -> Any:
    return value._version if isinstance(value, torch.Tensor) else copied(value)


def _equal(some: Any, others: Any) -> bool:
    if type(some) is not type(others):
        return False
    if isinstance(some, torch.Tensor):
        return some.shape == others.shape and torch.equal(some, others)
    if type(some) is dict:
        return some.keys() == others.keys() and all(_equal(value, others[key]) for key, value in some.items())
    if type(some) in (list, tuple):
        return len(some) == len(others) and all(map(_equal, some, others))
    return bool(some == others)
