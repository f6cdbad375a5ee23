"""The 0-dim state of parameters that are stepped together: mostly ``step``.

The optimizer steps the counter of a run's first piece. Each parameter of the run has a counter of its own in the user's
state, which follows that one. These followers lie side by side in memory, so that one copy brings all of them up to date, and
one look shows whether they still agree. Version counters would not show that: an edit through ``.data`` or NumPy moves none.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ...comm.streams import streams_of

__all__ = ["Counters"]

_version = operator.attrgetter("_version")
_place: Any = torch.Tensor.data_ptr


class _Followers:
    """The counters of a run's parameters, which follow the counter of a piece."""

    def __init__(self, leader: torch.Tensor, tensors: list[torch.Tensor]) -> None:
        self.leader, self.tensors = leader, tensors
        self.memory = torch.stack(tensors)
        self.places: list[int] = []
        for tensor, own in zip(tensors, self.memory.unbind(), strict=True):
            tensor.data = own  # code that holds the counter still sees it
            self.places.append(_place(own))


class Counters:
    """The counters of one group's parameters."""

    def __init__(self) -> None:
        self._sets: list[_Followers] = []
        self._followers: list[torch.Tensor] = []
        self._places: list[int] = []
        self._on_device: list[torch.Tensor] = []  # to read their values would be to wait for the device
        self._versions: list[int] = []

    def pair(self, runs: Iterable[tuple[dict[str, Any], Sequence[dict[str, Any] | None]]]) -> None:
        """Find the counters. `runs`: for each run the state of its first piece, and that of its parameters."""
        self._sets, self._on_device = [], []
        for leading, members in runs:
            for key, leader in leading.items():
                if not isinstance(leader, torch.Tensor) or leader.dim():
                    continue
                followers = [own[key] for own in members if own is not None and key in own]
                if not followers:
                    continue
                if streams_of(leader.device).exist:
                    self._on_device += followers
                self._sets.append(_Followers(leader, followers))
        self._followers = [tensor for some in self._sets for tensor in some.tensors]
        self._places = [place for some in self._sets for place in some.places]
        self.note()

    def are_as_left(self) -> bool:
        """Return True if each counter still has the value of the one that it follows."""
        if list(map(_place, self._followers)) != self._places:  # `.data = ...`
            return False
        for some in self._sets:
            if not streams_of(some.memory.device).exist:
                values = some.memory.tolist()
                if values.count(some.leader.item()) != len(values):
                    return False
        return list(map(_version, self._on_device)) == self._versions

    def follow(self) -> None:
        """Bring the counters up to date after a step."""
        for some in self._sets:
            some.memory.copy_(some.leader)

    def advance(self) -> None:
        """Count one step, ahead of its arithmetic."""
        for some in self._sets:
            some.memory.add_(1)
        self.note()

    def note(self) -> None:
        """Note that the counters are as the step has left them."""
        self._versions = list(map(_version, self._on_device))
