"""What ranks tell each other through the store, where a collective would wait.

One process serves the store to all ranks, so that no rank may ask it once for each of the others: neither writing nor reading
takes more requests where there are more ranks.
"""

from __future__ import annotations

from typing import Any

__all__ = ["Messages", "longest_pause"]


def longest_pause(ranks: int) -> float:
    """Return how many seconds may lie between two looks at the store of a rank that waits: many ranks look less often."""
    return max(0.02, 0.0002 * ranks)


class Messages:
    """The latest message of each rank under one key of the store.

    Args:
        store: a store of torch's, which all of the ranks reach.
        key: the same on all of them.
    """

    def __init__(self, store: Any, key: str) -> None:
        self._store, self._key = store, key
        self._listed = False  # as one of the writers
        self._seen = -1  # writes of all ranks up to the last look

    def write(self, rank: int, message: str | bytes) -> None:
        """Replace the message of `rank`, this one. Not collective."""
        self._store.set(f"{self._key}/{rank}", message)
        if not self._listed:
            # Behind the message: whoever finds the rank finds what it says.
            self._store.append(f"{self._key}/writers", f"{rank} ")
            self._listed = True
        self.announce()

    def announce(self) -> None:
        """Have all who wait for a message look once more."""
        self._store.add(f"{self._key}/writes", 1)

    def changed(self) -> bool:
        """Return True if there is something new since the last call, or this is the first."""
        writes = self._store.add(f"{self._key}/writes", 0)
        changed, self._seen = writes != self._seen, writes
        return bool(changed)

    def writers(self) -> set[int]:
        """Return the ranks that have written something up to now."""
        key = f"{self._key}/writers"
        return {int(rank) for rank in self._store.get(key).split()} if self._store.check([key]) else set()

    def read(self) -> dict[int, bytes]:
        """Return the messages by rank, of those that have written one."""
        ranks = sorted(self.writers())
        found = self._store.multi_get([f"{self._key}/{rank}" for rank in ranks]) if ranks else []
        return dict(zip(ranks, found, strict=True))
