"""Buffers of a backward's reductions that later ones take again."""

from __future__ import annotations

from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from typing import Generic, TypeVar

_Buffer = TypeVar("_Buffer")


class SpareBuffers(Generic[_Buffer]):
    """Buffers by key, such as length and dtype. One that is given back is kept only if a later reduction expects its like."""

    def __init__(self) -> None:
        self._spare: dict[Hashable, list[_Buffer]] = {}
        self._expected: Counter[Hashable] = Counter()

    def expect(self, keys: Iterable[Hashable]) -> None:
        """Declare the buffers that the coming backward will take."""
        self._expected = Counter(keys)

    def take(self, key: Hashable) -> _Buffer | None:
        """Return a spare buffer; None if there is none, so that the caller makes one."""
        spare = self._spare.get(key)
        found = spare.pop() if spare else None
        self._expected[key] -= 1
        if self._expected[key] <= 0:
            self._spare.pop(key, None)
        return found

    def give(self, key: Hashable, buffer: _Buffer) -> None:
        """Give a buffer back."""
        if self._expected[key] > 0:
            self._spare.setdefault(key, []).append(buffer)

    def __iter__(self) -> Iterator[_Buffer]:
        """Iterate over the spare buffers."""
        return (buffer for buffers in self._spare.values() for buffer in buffers)

    def drop(self) -> None:
        """Release all spare buffers."""
        self._spare.clear()
