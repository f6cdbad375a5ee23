"""The 0-dim state of parameters that are stepped together: ``step``, mostly.

The optimizer steps those of a run's first parameter, its *leaders*; the others follow. The followers of a leader lie side by
side in memory, one tensor over each, so that one copy brings all of them up to date, and one look shows whether they still
agree. Version counters would not show that: an edit through ``.data`` or NumPy moves none.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ...shard_tensor.tensor import ShardTensor

__all__ = ["Counters", "part_shared"]

_version = operator.attrgetter("_version")
_place: Any = torch.Tensor.data_ptr


def part_shared(state: Any) -> None:
    """Let each parameter of an optimizer's `state` count for itself, where the user has given two of them one counter."""
    plain = [
        value for own in state.values() if type(own) is dict for value in own.values() if type(value) is torch.Tensor
    ]
    if len(set(map(id, plain))) == len(plain):  # asked in each step
        return
    seen: set[int] = set()
    for own in (own for own in state.values() if type(own) is dict):
        for key, value in own.items():  # the key stays, so the dict may be gone through
            if type(value) is torch.Tensor and not value.dim():
                if id(value) in seen:
                    own[key] = value.clone()
                seen.add(id(value))


class _Followers:
    """The counters that follow one leader."""

    def __init__(self, leader: torch.Tensor, tensors: list[torch.Tensor]) -> None:
        self.leader, self.tensors = leader, tensors
        self.memory = torch.stack(tensors)
        self.places: list[int] = []
        for tensor, own in zip(tensors, self.memory.unbind(), strict=True):
            tensor.data = own  # whoever holds it still sees the counter
            self.places.append(_place(own))

    def lead_by(self, leader: torch.Tensor, tensors: list[torch.Tensor]) -> bool:
        """Follow another tensor; False where not all of these are others, or no longer where they were put."""
        if len(tensors) != len(self.tensors) or not all(map(operator.is_, tensors, self.tensors)):
            return False
        self.leader = leader
        return list(map(_place, tensors)) == self.places


class Counters:
    """The counters of one group's parameters."""

    def __init__(self) -> None:
        self._sets: list[_Followers] = []
        self._followers: list[torch.Tensor] = []
        self._places: list[int] = []
        self._elsewhere: list[
            torch.Tensor
        ] = []  # not in the CPU's memory: to read them would be to wait for the device
        self._versions: list[int] = []
        self._copies: list[torch.Tensor] = []  # what further pieces of a parameter have
        self._copied: list[torch.Tensor] = []

    def pair(self, runs: Iterable[tuple[Sequence[dict[str, Any] | None], Sequence[dict[str, Any]]]]) -> None:
        """Find them: for each run in the state of its members and in that of its pieces."""
        known, self._sets = self._sets, []
        self._elsewhere, self._copies, self._copied = [], [], []
        for members, pieces in runs:
            for key, leader in (members[0] or {}).items():
                if isinstance(leader, ShardTensor) or not isinstance(leader, torch.Tensor):
                    continue
                for piece in pieces[1:]:  # a kernel counts once for each tensor that it is given
                    if isinstance(piece.get(key), torch.Tensor):
                        self._copies.append(piece[key])
                        self._copied.append(leader)
                followers = [own[key] for own in members[1:] if own is not None and key in own]
                if leader.device.type != "cpu":
                    self._elsewhere += [leader, *followers]
                if followers:
                    before = known[len(self._sets)] if len(self._sets) < len(known) else None
                    same = before is not None and before.lead_by(leader, followers)
                    self._sets.append(before if before is not None and same else _Followers(leader, followers))
        self._followers = [tensor for some in self._sets for tensor in some.tensors]
        self._places = [place for some in self._sets for place in some.places]
        self.note()

    def are_as_left(self) -> bool:
        """Return True if counters that are stepped together still agree."""
        if list(map(_place, self._followers)) != self._places:  # `.data = ...`
            return False
        for some in self._sets:
            if some.memory.device.type == "cpu":
                values = some.memory.tolist()
                if values.count(some.leader.item()) != len(values):
                    return False
        return list(map(_version, self._elsewhere)) == self._versions

    def load(self) -> None:
        """Copy what the user has made of the leaders, before a step."""
        if self._copies:
            torch._foreach_copy_(self._copies, self._copied)

    def follow(self) -> None:
        """Bring the followers up to date with the leaders, which have been stepped."""
        for some in self._sets:
            some.memory.copy_(some.leader)

    def note(self) -> None:
        """Note that the counters are as the step has left them."""
        self._versions = list(map(_version, self._elsewhere))
