"""Work of every rank by itself that all of them end together, and small objects sent between them."""

from __future__ import annotations

import contextlib
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from ..errors import CheckpointError
from ..runtime import Runtime
from ..watch import blocking, default_store
from ..whole import agree

__all__ = ["broadcast", "each", "gather", "scatter"]

T = TypeVar("T")


def each(runtime: Runtime, what: str, function: Callable[[], T], nonce: str = "", key: object = None) -> T:
    """Run `function` on every rank; all of them return, or all raise. Collective.

    Args:
        runtime: whose ranks.
        what: the operation, for messages.
        function: this rank's work, without collectives. With a `nonce` it may take as long as it likes: a rank that is at
            work says so through the store, and only one that says nothing for ``ShardConfig.timeout`` seconds is missed.
        nonce: the same on all ranks, and never used before.
        key: must be equal on all ranks; a function is called with the result.

    Raises:
        ShardError: the rank's own; on the others one of the same class that quotes it. An OSError becomes a
            :class:`CheckpointError`; other exceptions stay what they are where they occurred.
    """
    error: Exception | None = None
    result: Any = None
    with _at_work(runtime, what, nonce):
        try:
            result = function()
        except OSError as problem:
            error = CheckpointError(
                f"rank {runtime.collectives.world_rank}: {what}: {problem}. Nothing in training was changed."
            )
            error.__cause__ = problem
        except Exception as problem:
            error = problem
    own = None if error is not None else key(result) if callable(key) else key
    agree(runtime, what, own, error)
    _forget(runtime, nonce)
    return result  # type: ignore[no-any-return]


@contextlib.contextmanager
def _at_work(runtime: Runtime, what: str, nonce: str) -> Iterator[None]:
    """Say through the store that this rank is at work inside; leave when all have come, or one is missing."""
    c = runtime.collectives
    here = _keys(runtime, nonce)
    if not here:
        yield
        return
    store = default_store()
    beats = [f"{key}/beat" for key in here]
    stop = threading.Event()

    def beat() -> None:
        while not stop.wait(c.watch.timeout / 4):
            with contextlib.suppress(RuntimeError):
                store.add(beats[c.world_rank], 1)

    thread = threading.Thread(target=beat, name="torch_shard checkpoint", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        with contextlib.suppress(RuntimeError):  # the store is gone: what follows will say so
            store.set(here[c.world_rank], "x")
            _wait(store, here, beats, c.watch.timeout)


def _keys(runtime: Runtime, nonce: str) -> list[str]:
    """Of the store, one for each rank; none where there is no other rank, or no `nonce`."""
    c = runtime.collectives
    base = c.watch.channels["control"].groups.key if c.world > 1 and nonce and "control" in c.watch.channels else ""
    return [f"{base}/checkpoint/{nonce}/{rank}" for rank in range(c.world)] if base else []


def _forget(runtime: Runtime, nonce: str) -> None:
    """All ranks have seen that all are there."""
    for key in _keys(runtime, nonce)[runtime.collectives.world_rank :][:1]:
        with contextlib.suppress(RuntimeError):
            default_store().delete_key(key)


def _wait(store: Any, here: list[str], beats: list[str], timeout: float) -> None:
    seen: dict[int, int] = {}
    pause, looked = 0.0005, time.monotonic()
    heard = looked
    while not store.check(here):
        now = time.monotonic()
        if now > looked + timeout / 4:
            looked = now
            for rank, key in enumerate(beats):
                count = store.add(key, 0)
                if count != seen.setdefault(rank, 0):
                    seen[rank], heard = count, now
        if now > heard + timeout:
            return  # the comparison that follows names the missing rank
        time.sleep(pause)
        pause = min(2 * pause, 0.01)


# -- objects ----------------------------------------------------------------------------------------------------------
# They come from the same program's other ranks, so unpickling them is safe.


def broadcast(runtime: Runtime, value: T, what: str) -> T:
    """Rank 0's object on every rank. Collective."""
    c = runtime.collectives
    if c.world == 1:
        return value
    raw = _packed(value) if c.world_rank == 0 else None
    size = torch.tensor([0 if raw is None else raw.numel()], dtype=torch.int64, device="cpu")
    blocking(c.watch, "control", what, dist.broadcast, size, src=c.watch.ranks[0])
    data = raw if raw is not None else torch.empty(int(size), dtype=torch.uint8, device="cpu")
    blocking(c.watch, "control", what, dist.broadcast, data, src=c.watch.ranks[0])
    return value if raw is not None else pickle.loads(data.numpy().tobytes())


def gather(runtime: Runtime, value: T, what: str) -> list[T] | None:
    """Every rank's object, by rank, on rank 0; None elsewhere. Collective."""
    c = runtime.collectives
    if c.world == 1:
        return [value]
    raw = _packed(value)
    sizes = torch.zeros(c.world, dtype=torch.int64, device="cpu")
    sizes[c.world_rank] = raw.numel()
    blocking(c.watch, "control", what, dist.all_reduce, sizes)
    message = torch.zeros(int(sizes.max()), dtype=torch.uint8, device="cpu")
    message[: raw.numel()] = raw
    parts = [torch.empty_like(message) for _ in range(c.world)] if c.world_rank == 0 else None
    blocking(c.watch, "control", what, dist.gather, message, parts, dst=c.watch.ranks[0])
    if parts is None:
        return None
    return [pickle.loads(p[:n].numpy().tobytes()) for p, n in zip(parts, sizes.tolist(), strict=True)]


def scatter(runtime: Runtime, values: list[T] | None, what: str) -> T:
    """Rank 0's objects, one for each rank. Collective."""
    c = runtime.collectives
    if c.world == 1:
        assert values is not None
        return values[0]
    raws = None if values is None else [_packed(value) for value in values]
    sizes = torch.zeros(c.world, dtype=torch.int64, device="cpu")
    if raws is not None:
        sizes = torch.tensor([raw.numel() for raw in raws], dtype=torch.int64, device="cpu")
    blocking(c.watch, "control", what, dist.broadcast, sizes, src=c.watch.ranks[0])
    width = int(sizes.max())
    received = torch.empty(width, dtype=torch.uint8, device="cpu")
    padded = None if raws is None else [torch.nn.functional.pad(raw, (0, width - raw.numel())) for raw in raws]
    blocking(c.watch, "control", what, dist.scatter, received, padded, src=c.watch.ranks[0])
    found: T = pickle.loads(received[: int(sizes[c.world_rank])].numpy().tobytes())
    return found


def _packed(value: object) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value)), dtype=torch.uint8)
