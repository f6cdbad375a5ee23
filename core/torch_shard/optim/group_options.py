"""The options of a parameter group (``lr`` and the like) where one step is divided into several.

A class may count in its groups (``group["step"] += 1``). Each of the steps gets a copy of the options as they were before the
first, so that all of them begin alike and what the class counts is counted once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_map

_OF_PARAMETERS = frozenset({"params", "param_names"})  # entries with an element for each parameter
_MUTABLE = (torch.Tensor, list, tuple, dict, set)


class Snapshot:
    """A parameter group, and a record of its options as they are now."""

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
    """The options of one of the user's groups, before several steps and after them."""

    def __init__(self, group: dict[str, Any]) -> None:
        self._group = group
        self._before = copied_options(group)
        self._made: dict[str, Any] = {}
        self._left = Snapshot({})  # the user's group as the steps, or `take_back`, have left it
        self._taken_back: set[str] = set()

    def fresh(self) -> Snapshot:
        """Return a group for one of the steps, with values of its own."""
        return Snapshot(copied_options(self._before))

    def stepped(self, given: Snapshot) -> None:
        """Note what a step has made of the options that it was given."""
        self._made.update(given.changes())

    def write_back(self) -> None:
        """Put what the steps have made of the options into the user's group."""
        for key, value in self._made.items():
            put(self._group, key, value)
        self._left = Snapshot(self._group)

    def take_back(self) -> None:
        """Undo :meth:`write_back`, but for options that the user has edited since."""
        self._taken_back = self._made.keys() - self._left.changes().keys()
        for key in self._taken_back:
            if key in self._before:
                put(self._group, key, self._before[key])
            else:
                self._group.pop(key, None)
        self._left = Snapshot(self._group)

    def put_back(self) -> None:
        """Undo :meth:`take_back`, but for options that were set since."""
        for key in self._taken_back - self._left.changes().keys():
            put(self._group, key, self._made[key])


def copied_options(group: dict[str, Any]) -> dict[str, Any]:
    """Return a copy of a group with copies of its options, in which a step may change values in place."""
    return {key: value if key in _OF_PARAMETERS else _copied(value) for key, value in group.items()}


def _copied(value: Any) -> Any:
    if not isinstance(value, _MUTABLE):
        return value
    if isinstance(value, set):
        return set(value)
    return tree_map(lambda leaf: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf, value)


def put(group: dict[str, Any], key: str, value: Any) -> None:
    """Set an option. If the group has a tensor of the value's shape, copy the value into that."""
    held = group.get(key)
    if isinstance(held, torch.Tensor) and isinstance(value, torch.Tensor) and held.shape == value.shape:
        with torch.no_grad():
            held.copy_(value)
    else:
        group[key] = _copied(value)


def _mark(value: Any) -> Any:
    return value._version if isinstance(value, torch.Tensor) else _copied(value)


def _equal(some: Any, others: Any) -> bool:
    (leaves, tree), (other_leaves, other_tree) = tree_flatten(some), tree_flatten(others)
    return tree == other_tree and all(map(_equal_leaves, leaves, other_leaves))


def _equal_leaves(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    return type(one) is type(other) and bool(one == other)
