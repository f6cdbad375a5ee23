"""One group's options (``lr`` and the like), of which several steps in turn shall each begin with the same."""

from __future__ import annotations

import copy
from typing import Any

import torch

__all__ = ["Options"]


class Options:
    """What the steps of one group begin with, and what becomes of it: a class may count in its groups
    (``group["step"] += 1``), and what it counts is counted once."""

    def __init__(self, group: dict[str, Any]) -> None:
        self._group = group
        self._before = {key: _own(value) for key, value in group.items() if key != "params"}
        self._made: dict[str, Any] = {}
        self._undone: dict[str, Any] = {}
        self._versions: dict[str, int] = {}  # of tensors, as they were put into the group

    def fresh(self) -> dict[str, Any]:
        """A group for one step; the values are its own."""
        return {**{key: _own(value) for key, value in self._before.items()}, "params": self._group["params"]}

    def stepped(self, group: dict[str, Any]) -> None:
        """A step has been made with one of :meth:`fresh`."""
        for key, value in group.items():
            if key != "params" and (key not in self._before or _changed(value, self._before[key])):
                self._made[key] = value

    def write_back(self) -> None:
        """Put what the steps have made of the options into the user's group."""
        for key, value in self._made.items():
            _put(self._group, key, value)
            self._note(key)

    def _note(self, key: str) -> None:
        held = self._group.get(key)
        if isinstance(held, torch.Tensor):
            self._versions[key] = held._version

    def undo(self) -> None:
        """The options as they were before, but for what somebody else has changed since."""
        for key, value in self._made.items():
            held = self._group.get(key)
            if isinstance(held, torch.Tensor):
                edited = held._version != self._versions.get(key)
            else:
                edited = held is not value and _changed(held, value)
            if edited:
                continue
            self._undone[key] = value
            if key in self._before:
                _put(self._group, key, self._before[key])
                self._note(key)
            else:
                del self._group[key]
        self._made.clear()

    def redo(self) -> None:
        """A step was made with them. What it has left as it was becomes what it was before :meth:`undo`."""
        for key, value in self._undone.items():
            held = self._group.get(key)
            if isinstance(held, torch.Tensor):
                same = held._version == self._versions.get(key)
            else:
                same = key not in self._group if key not in self._before else not _changed(held, self._before[key])
            if same:
                _put(self._group, key, value)
        self._undone.clear()


def _own(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    return copy.copy(value) if isinstance(value, (list, dict, set)) else value


def _changed(value: Any, before: Any) -> bool:
    if isinstance(value, torch.Tensor):
        # A copy has a version of its own, from 0 on; to compare values would be to wait for the device.
        return value._version > 0 or not isinstance(before, torch.Tensor)
    if isinstance(value, (list, dict, set)):
        return bool(value != before)
    return value is not before


def _put(group: dict[str, Any], key: str, value: Any) -> None:
    held = group.get(key)
    if isinstance(held, torch.Tensor) and isinstance(value, torch.Tensor) and held.shape == value.shape:
        with torch.no_grad():
            held.copy_(value)
    else:
        group[key] = _own(value)
