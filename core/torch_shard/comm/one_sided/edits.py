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

import zlib

import torch

__all__ = ["Edits", "checksum"]

_MASK = (1 << 61) - 1
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by the bytes of an element


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
        self._sources: dict[int, torch.Tensor] = {}  # full plain tensors, by their numbers

    def number(self, name: str) -> int:
        """Return the number of the values that a parameter has."""
        return self._numbers.get(name, 0)

    @property
    def digest(self) -> int:
        """A number that names the values of all parameters; :attr:`base` where none is edited."""
        parts = (zlib.crc32(name.encode()) * number for name, number in self._numbers.items())
        return (self.base + sum(parts)) & _MASK

    def keep(self, name: str, shard: torch.Tensor) -> None:
        """Keep the shard of a parameter that is about to be edited."""
        if name not in self.before:
            self.before[name] = shard.detach().clone()

    def put(self, name: str, source: torch.Tensor) -> None:
        """Note that the full tensor `source` was copied into a parameter."""
        # No weak reference: what a script copies from is often a tensor of the moment, such as `average.to(device).data`.
        number = self._numbers[name] = checksum(source)
        self._sources[number] = source.detach()

    def put_back(self, name: str, number: int) -> None:
        """Note that a copy of the values with this number, which the parameter had before, was copied into it."""
        if number:
            self._numbers[name] = number
        else:
            self._numbers.pop(name, None)
            self.before.pop(name, None)

    def known(self) -> dict[str, torch.Tensor] | None:
        """Return the full values of all edited parameters, by name; None if some are not known (any more)."""
        found = {name: self._sources.get(number) for name, number in self._numbers.items()}
        for name, source in found.items():
            if source is None or checksum(source) != self._numbers[name]:  # it was edited since it was copied
                return None
        return found  # type: ignore[return-value]

    def touch(self, name: str) -> None:
        """Note that the running change is one of other kind, of the parameter `name` among others."""
        self.base = (self.base * 0x9E3779B97F4A7C15 + zlib.crc32(name.encode())) & _MASK

    def close(self) -> None:
        """Begin anew behind a change of another kind."""
        self.base = self.digest
        self.before, self._numbers, self._sources = {}, {}, {}

    def forget(self) -> None:
        """Begin anew with values that all ranks have."""
        self.__init__()  # type: ignore[misc]


def checksum(tensor: torch.Tensor) -> int:
    """Return a number above 0 that depends on the bits of `tensor` alone."""
    flat = tensor.detach().contiguous().view(-1)
    bits = flat.view(_INTEGERS[min(flat.element_size(), 8)])
    # Of an even number of equal elements the second is 0.
    total = int(bits.sum(dtype=torch.int64))
    mixed = int(torch.hash_tensor(bits).view(torch.int64)) if bits.numel() else 0
    return ((total * 0x9E3779B97F4A7C15 ^ mixed) & _MASK) | 1
