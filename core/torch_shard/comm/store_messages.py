"""Messages between ranks through torch's key-value store, for cases in which a collective would wait.

One process serves the store to all ranks. A rank must therefore not send it one request for each other rank: the number of
requests for a write or a read does not grow with the number of ranks.
"""

from __future__ import annotations

from typing import Any


def longest_pause(ranks: int) -> float:
    """Return the most seconds that a waiting rank sleeps between two requests to the store; more for many ranks."""
    return max(0.02, 0.0002 * ranks)


class Messages:
    """The latest message of each rank under one key of the store.

    Args:
        store: a store of torch.distributed that all ranks can reach.
        key: the prefix of the keys, equal on all ranks.
    """

    def __init__(self, store: Any, key: str) -> None:
        self._store, self._key = store, key
        self._listed = False  # True once this rank is listed under "writers"
        self._seen = -1  # the count of all ranks' writes at the last call of `changed`

    def write(self, rank: int, message: str | bytes) -> None:
        """Replace the message of `rank`, which must be this rank. Not collective."""
        self._store.set(f"{self._key}/{rank}", message)
        if not self._listed:
            # After the message is set: a reader that finds the rank listed can read its message.
            self._store.append(f"{self._key}/writers", f"{rank} ")
            self._listed = True
        self.announce()

    def announce(self) -> None:
        """Make `changed` return True on all ranks, so that ranks which wait for a message read again."""
        self._store.add(f"{self._key}/writes", 1)

    def announced(self) -> int:
        """Return how often ranks have written or announced."""
        return int(self._store.add(f"{self._key}/writes", 0))

    def changed(self) -> bool:
        """Return True if a rank has written since the last call of this method, and on the first call."""
        writes = self.announced()
        changed, self._seen = writes != self._seen, writes
        return changed

    def writers(self) -> set[int]:
        """Return the ranks that have written a message so far."""
        key = f"{self._key}/writers"
        return {int(rank) for rank in self._store.get(key).split()} if self._store.check([key]) else set()

    def read(self) -> dict[int, bytes]:
        """Return the latest message of each rank that has written one, by rank."""
        ranks = sorted(self.writers())
        found = self._store.multi_get([f"{self._key}/{rank}" for rank in ranks]) if ranks else []
        return dict(zip(ranks, found, strict=True))
