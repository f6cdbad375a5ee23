"""A barrier through the store, at which a rank may come late as long as its heartbeat shows that it is alive.

A collective needs all ranks within one timeout and a thread that waits in it. At this barrier a rank may take any time, may
wait in any thread, and may come after the process group has been destroyed: the store lives while a reference to it exists.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator
from typing import Any

from ..errors import MissingRankError
from .store_messages import Messages, longest_pause

_PART = 4 << 20  # bytes of a value in the store; torch's store takes at most 8 MiB
_ASKED = 4  # heartbeats that a waiting rank asks for at a time, however many ranks are missing


class HeartbeatBarrier:
    """One barrier of the ranks of a mesh, with messages.

    Args:
        store: a store of torch.distributed that all ranks can reach.
        key: the prefix of the keys in the store: equal on all ranks, and never used before.
        rank, world: the number of this rank, and the number of ranks.
        timeout: seconds without a heartbeat after which a rank counts as missing.
    """

    def __init__(self, store: Any, key: str, rank: int, world: int, timeout: float) -> None:
        self._store, self._key, self.rank, self.world, self.timeout = store, key, rank, world, timeout
        self._keys: list[str] = []  # the keys that this rank has set in the store
        self._names: list[str] = []  # the names of the messages that this rank has left

    @contextlib.contextmanager
    def heartbeat(self) -> Iterator[None]:
        """Send this rank's heartbeat, from a thread, while the body runs."""
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

    def post(self, what: str, message: bytes = b"") -> None:
        """Put a message of this rank, named `what`, into the store for all other ranks.

        Raises:
            RuntimeError: the store is gone.
        """
        parts = [message[at : at + _PART] for at in range(0, len(message), _PART)]
        keys = [f"{self._key}/{what}/{self.rank}/{number}" for number in range(len(parts))]
        for key, part in zip(keys, parts, strict=True):
            self._store.set(key, part)
        # After the parts: a reader that finds the number of parts can read all of them.
        Messages(self._store, f"{self._key}/{what}").write(self.rank, str(len(parts)))
        self._keys += [*keys, f"{self._key}/{what}/{self.rank}"]
        self._names.append(what)

    def read(self, what: str, rank: int) -> bytes:
        """Return the message `what` of `rank`; wait until that rank has left it.

        Raises:
            MissingRankError: `rank` has not left the message, and has sent no heartbeat for `timeout` seconds.
            RuntimeError: the store is gone.
        """
        self.wait(what, [rank])
        key = f"{self._key}/{what}/{rank}"
        return b"".join(self._store.get(f"{key}/{number}") for number in range(int(self._store.get(key))))

    def wait(self, what: str, ranks: list[int]) -> None:
        """Wait until each of `ranks` has left its message `what`.

        Raises:
            MissingRankError: messages are missing, and the first few ranks that lack one have sent no heartbeat for `timeout`
                seconds.
            RuntimeError: the store is gone.
        """
        missing, messages = set(ranks), Messages(self._store, f"{self._key}/{what}")
        beats: dict[int, int] = {}
        began = looked = heard = time.monotonic()
        while True:
            if messages.changed():
                missing -= messages.writers()
            if not missing:
                return
            now, asked = time.monotonic(), sorted(missing)[:_ASKED]
            if now > looked + self.timeout / 4:
                looked = now
                for rank in asked:
                    count = self._store.add(self._beat(rank), 0)
                    if count != beats.setdefault(rank, 0):
                        beats[rank], heard = count, now
            if now > heard + self.timeout:
                raise MissingRankError(
                    f"rank {self.rank} waits for {what!r} of rank {', '.join(map(str, asked))}, of which nothing was "
                    f"heard for {self.timeout:.0f} s (ShardConfig.timeout): it has failed, or its process is gone."
                )
            # The pause grows with the wait, so that at most a twentieth of the wait is lost.
            time.sleep(min(max(0.0005, (now - began) / 20), longest_pause(self.world)))

    def forget(self, *others: str) -> None:
        """Delete this rank's messages, which all other ranks must have read, and the messages `others` of all ranks."""
        keys = [*self._keys, self._beat(self.rank)]
        keys += [f"{self._key}/{what}/{rank}" for what in others for rank in range(self.world)]
        if self.rank == 0:
            keys += [f"{self._key}/{what}/{end}" for what in (*self._names, *others) for end in ("writers", "writes")]
        for key in keys:
            with contextlib.suppress(RuntimeError):
                self._store.delete_key(key)

    def _beat(self, rank: int) -> str:
        return f"{self._key}/beat/{rank}"
