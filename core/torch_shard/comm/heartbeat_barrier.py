"""Ranks that come to one point at their own time, and know through the store that the others are alive.

Collectives need all ranks at once and a main thread that waits; here a rank may take as long as it likes, in any thread, and
after the process group is gone: the store outlives it while somebody holds it.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

from ..errors import MissingRankError

__all__ = ["Meeting"]

_PART = 4 << 20  # bytes; a store takes no values of any size (8 MiB is the limit of torch's)


class Meeting:
    """One occasion on which the ranks of a mesh wait for each other.

    Args:
        store: reached by all of them.
        key: the same on all ranks, and never used before.
        rank, world: this rank, and how many there are.
        timeout: seconds after which a rank that says nothing is missing.
    """

    def __init__(self, store: Any, key: str, rank: int, world: int, timeout: float) -> None:
        self._store, self._key, self.rank, self.world, self.timeout = store, key, rank, world, timeout
        self._mine: list[str] = []
        self._said: list[str] = []

    @contextlib.contextmanager
    def at_work(self) -> Iterator[None]:
        """Inside, this rank says that it lives, however long it takes."""
        stop = threading.Event()

        def beat() -> None:
            while not stop.wait(self.timeout / 4):
                with contextlib.suppress(RuntimeError):
                    self._store.add(self._beat(self.rank), 1)

        thread = threading.Thread(target=beat, name="torch_shard heartbeat", daemon=True)
        thread.start()
        try:
            yield
        finally:
            stop.set()
            thread.join()

    def say(self, what: str, message: bytes = b"") -> None:
        """Leave a message of this rank for all others.

        Raises:
            RuntimeError: the store is gone.
        """
        parts = [message[at : at + _PART] for at in range(0, len(message), _PART)]
        for number, part in enumerate(parts):
            self._set(f"{self._name(what, self.rank)}/{number}", part)
        # Last: whoever finds it finds everything.
        self._set(self._name(what, self.rank), str(len(parts)).encode())
        self._store.add(self._count(what), 1)
        self._said.append(what)

    def hear(self, what: str, rank: int) -> bytes:
        """What `rank` has said, or will say.

        Raises:
            MissingRankError: it has not, and says nothing else either.
            RuntimeError: the store is gone.
        """
        self.wait(what, [rank])
        key = self._name(what, rank)
        return b"".join(self._store.get(f"{key}/{number}") for number in range(int(self._store.get(key))))

    def wait(self, what: str, ranks: list[int]) -> None:
        """Until all of these ranks have said it.

        Raises:
            MissingRankError: one of them has not, and none of those has given a sign of life for `timeout` seconds.
            RuntimeError: the store is gone.
        """
        wanted = [self._name(what, rank) for rank in ranks]
        seen: dict[int, int] = {}
        missing, began = ranks, time.monotonic()
        looked = heard = began
        # One look at a store that serves all ranks must not cost as much as there are ranks.
        slowest = max(0.01, 0.0002 * self.world)

        def come() -> bool:
            if len(wanted) == self.world:
                return bool(self._store.add(self._count(what), 0) >= self.world)
            return bool(self._store.check(wanted))

        while not come():
            now = time.monotonic()
            if now > looked + self.timeout / 4:
                looked = now
                missing = [rank for rank, key in zip(ranks, wanted, strict=True) if not self._store.check([key])]
                for rank in missing:
                    count = self._store.add(self._beat(rank), 0)
                    if count != seen.setdefault(rank, 0):
                        seen[rank], heard = count, now
            if now > heard + self.timeout:
                raise MissingRankError(
                    f"rank {self.rank} waits for {what!r} of rank {', '.join(map(str, missing))}, of which nothing was heard for "
                    f"{self.timeout:.0f} s (ShardConfig.timeout): it has failed, or its process is gone."
                )
            # A twentieth of the wait is lost at most.
            time.sleep(min(max(0.0005, (now - began) / 20), slowest))

    def forget(self, *others: str) -> None:
        """Remove this rank's messages, which all others must have heard, and `others` that all ranks have left."""
        counts = [self._count(what) for what in (*self._said, *others)] if self.rank == 0 else []
        left = [self._name(what, rank) for what in others for rank in range(self.world)]
        for key in (*self._mine, self._beat(self.rank), *counts, *left):
            with contextlib.suppress(RuntimeError):
                self._store.delete_key(key)

    def _set(self, key: str, value: bytes) -> None:
        self._mine.append(key)
        self._store.set(key, value)

    def _count(self, what: str) -> str:
        return f"{self._key}/{what}/count"

    def _name(self, what: str, rank: int) -> str:
        return f"{self._key}/{rank}/{what}"

    def _beat(self, rank: int) -> str:
        return f"{self._key}/{rank}/beat"
