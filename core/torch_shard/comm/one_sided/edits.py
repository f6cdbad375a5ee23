"""Edits of single parameters whose new values this rank knows in full, so that it may read a model which it alone has edited.

Scripts put averaged weights into a model on one rank, sample or save there, and put the weights of before back::

    stored = [p.detach().clone() for p in params]                 # shards
    for p, average in zip(params, averages): p.data.copy_(average)  # full plain tensors
    ...                                                             # this rank reads the model
    for p, before in zip(params, stored): p.data.copy_(before)

Each parameter has a number that names its values: 0 for those that the latest step or load has left, a checksum for a full tensor
that was copied in. A copy of the parameter, such as `stored`, remembers the number, so that it is known again when it is copied
back. Ranks that have copied equal tensors in have equal numbers, and are back at the same version when they have put all back.
"""

from __future__ import annotations

import hashlib
import math
import zlib
from collections.abc import Mapping

import torch

from ...utils.autograd_private import storage_uses

_MASK = (1 << 61) - 1


class Edits:
    """The edits of one model's parameters since its latest other change.

    Attributes:
        base: a digest of what was edited before that change, and in it; 0 for nothing.
        before: this rank's shards of the parameters that are edited now, as they were before, by name.
    """

    def __init__(self) -> None:
        self.base = 0
        self.before: dict[str, torch.Tensor] = {}
        self._numbers: dict[str, int] = {}
        self._sources: dict[tuple[str, int], torch.Tensor] = {}  # full plain tensors, by parameters and numbers
        self._latest: list[tuple[str, int]] = []  # those of the latest edit

    def number(self, name: str) -> int:
        """Return the number of the values that a parameter has."""
        return self._numbers.get(name, 0)

    @property
    def digest(self) -> int:
        """A number that names the values of all parameters; :attr:`base` where none is edited."""
        parts = (zlib.crc32(name.encode()) * number for name, number in self._numbers.items())
        return (self.base + sum(parts)) & _MASK

    def begin(self, shards: Mapping[str, torch.Tensor]) -> None:
        """Keep copies of the shards, by name, of parameters that are about to be edited."""
        for name, shard in shards.items():
            if name not in self.before:
                self.before[name] = shard.detach().clone()
        # A script that fills a model with one tensor after the other lets go of each: the memory of all would be too much.
        for key in self._latest:
            if key in self._sources and _only_here(self._sources[key]):
                del self._sources[key]
        self._latest = []

    def put(self, name: str, source: torch.Tensor) -> None:
        """Note that the full tensor `source` was copied into a parameter."""
        # No weak reference: what a script copies from is often a tensor of the moment, such as `average.to(device).data`.
        key = name, _checksum(source)
        self._numbers[name], self._sources[key] = key[1], source.detach()
        self._latest.append(key)

    def put_back(self, name: str, number: int) -> None:
        """Note that a copy of the values with this number, which the parameter had before, was copied into it."""
        if number:
            self._numbers[name] = number
        else:
            self._numbers.pop(name, None)
            self.before.pop(name, None)

    def known(self) -> dict[str, torch.Tensor] | None:
        """Return the full values of all edited parameters, by name; None if some are not known (any more)."""
        found = {name: self._sources[name, n] for name, n in self._numbers.items() if (name, n) in self._sources}
        if len(found) < len(self._numbers) or any(_checksum(found[name]) != self._numbers[name] for name in found):
            return None  # also if one was edited since it was copied
        return found

    def touch(self, name: str) -> None:
        """Note that the running change, which is of another kind, changes the parameter `name`, too."""
        self.base = (self.base * 0x9E3779B97F4A7C15 + zlib.crc32(name.encode())) & _MASK

    def close(self) -> None:
        """Begin anew after a change of another kind."""
        self.base = self.digest
        self.before, self._numbers, self._sources, self._latest = {}, {}, {}, []

    def forget(self) -> None:
        """Begin anew with values that all ranks have."""
        self.close()
        self.base = 0


def _checksum(tensor: torch.Tensor) -> int:
    """Return a number above 0 that depends on the bits of `tensor` alone. It reads the tensor twice."""
    flat = tensor.detach().contiguous().view(-1).view(torch.uint8)
    if flat.storage_offset() % 8:
        flat = flat.clone()
    # As a square of words, of which the sums of rows and of columns are hashed in their order: a sum of all would be the same
    # for rows that have changed places.
    side = math.isqrt(flat.numel() // 8)
    square, rest = flat[: 8 * side * side].view(torch.int64).view(side, side), flat[8 * side * side :]
    words = rest[: rest.numel() // 8 * 8].view(torch.int64)
    parts = torch.cat([square.sum(0), square.sum(1), words, rest[words.nbytes :].to(torch.int64)])
    return int.from_bytes(hashlib.blake2b(parts.cpu().numpy().tobytes(), digest_size=8).digest(), "big") & _MASK | 1


def _only_here(tensor: torch.Tensor) -> bool:
    """Return True if no other tensor has the memory of `tensor`."""
    return storage_uses(tensor) <= 2
