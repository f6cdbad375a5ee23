"""The 0-dim state of parameters that are stepped together: mostly ``step``.

The optimizer steps the counter of a run's first piece. Each parameter of the run has a counter of its own in the user's
state, which follows that one. The followers of all runs lie side by side in memory, so that two kernels bring them up to date,
and one look shows whether they still agree. Version counters would not show that: an edit through ``.data`` or NumPy moves none.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from ...comm.streams import streams_of

_version = operator.attrgetter("_version")
_place: Any = torch.Tensor.data_ptr


class _Followers:
    """Counters of one dtype and device, each of which follows the counter of a run's first piece."""

    def __init__(self, pairs: list[tuple[torch.Tensor, list[torch.Tensor]]]) -> None:
        """Lay the counters side by side. `pairs` has for each run the counter that leads, and those that follow."""
        self.leaders = [leader for leader, _ in pairs]
        self.tensors = [tensor for _, own in pairs for tensor in own]
        self.memory = torch.stack(self.tensors)
        self.places: list[int] = []
        for tensor, own in zip(self.tensors, self.memory.unbind(), strict=True):
            tensor.data = own  # code that holds the counter still sees it
            self.places.append(_place(own))
        self._lengths = [len(own) for _, own in pairs]
        # By follower, which of the leaders it follows. It is made on the device: a list would have to be sent there.
        made = [torch.full((length,), number, device=self.memory.device) for number, length in enumerate(self._lengths)]
        self._index = torch.cat(made)

    @property
    def on_device(self) -> bool:
        """True if to read a value would be to wait for the device."""
        return streams_of(self.memory.device).exist

    def agree(self) -> bool:
        """Return True if each counter has the value of its leader. Not for those on a device."""
        pairs = zip(self.leaders, self._lengths, strict=True)
        return self.memory.tolist() == [value for leader, length in pairs for value in [leader.item()] * length]

    def follow(self) -> None:
        """Take the leaders' values. A device gets two kernels for that, however many counters there are."""
        torch.index_select(torch.stack(self.leaders).to(self.memory), 0, self._index, out=self.memory)


class Counters:
    """The counters of one group's parameters."""

    def __init__(self) -> None:
        self.pair(())

    def pair(self, runs: Iterable[tuple[dict[str, Any], Sequence[dict[str, Any] | None]]]) -> None:
        """Find the counters. `runs` has for each run the state of its first piece, and that of its parameters."""
        pairs: dict[Any, list[tuple[torch.Tensor, list[torch.Tensor]]]] = {}
        for leading, members in runs:
            for key, leader in leading.items():
                if not isinstance(leader, torch.Tensor) or leader.dim():
                    continue
                followers = [own[key] for own in members if own is not None and key in own]
                if followers:
                    kind = leader.dtype, leader.device, followers[0].dtype, followers[0].device
                    pairs.setdefault(kind, []).append((leader, followers))
        self._sets = [_Followers(own) for own in pairs.values()]
        self._followers = [tensor for some in self._sets for tensor in some.tensors]
        self._places = [place for some in self._sets for place in some.places]
        self._on_device = [tensor for some in self._sets if some.on_device for tensor in some.tensors]
        self.note()

    def are_as_left(self) -> bool:
        """Return True if each counter still has the value of the one that it follows."""
        if list(map(_place, self._followers)) != self._places:  # `.data = ...`
            return False
        if not all(some.on_device or some.agree() for some in self._sets):
            return False
        return list(map(_version, self._on_device)) == self._versions

    def follow(self) -> None:
        """Bring the counters up to date after a step."""
        for some in self._sets:
            some.follow()

    def advance(self) -> None:
        """Count one step, ahead of its arithmetic."""
        for some in self._sets:
            some.memory.add_(1)
        self.note()

    def note(self) -> None:
        """Note that the counters are as the step has left them."""
        self._versions = list(map(_version, self._on_device))
