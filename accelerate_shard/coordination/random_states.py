"""The beginning of a shuffled dataloader, where Accelerate sends rank 0's random state to all ranks.

Under DDP rank 0 may sample or evaluate alone while the others begin the next epoch and wait for it there. With a sharded model,
rank 0 may then need the other ranks, for a forward with gradients for example, and neither side could go on. The ranks are
therefore compared before the state is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any


class _Announced(list[Any]):
    """The kinds of random states that a dataloader synchronizes, over which Accelerate iterates each time it does so."""

    def __init__(self, kinds: list[Any], begin: Callable[[], None]) -> None:
        super().__init__(kinds)
        self._begin = begin

    def __iter__(self) -> Iterator[Any]:
        if len(self):
            self._begin()
        return super().__iter__()

    def __reduce__(self) -> Any:
        return list, (self[:],)


def announce(loader: Any, begin: Callable[[], None]) -> None:
    """Call `begin` on each rank before a prepared dataloader synchronizes random states. Not collective."""
    if getattr(loader, "rng_types", None):
        loader.rng_types = _Announced(loader.rng_types, begin)
