"""Steps that each rank runs by itself and that end together on all ranks, and collectives of small objects."""

from __future__ import annotations

import contextlib
import gc
import json
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from .. import errors
from ..errors import CheckpointError, MissingRankError
from .collectives import Collectives
from .consensus import agree
from .heartbeat_barrier import HeartbeatBarrier
from .ports import ModelPort
from .rendezvous import exchange_texts
from .watchdog import blocking
from .work import default_store

_T = TypeVar("_T")


def each(port: ModelPort, what: str, function: Callable[[], _T], nonce: str = "", key: object = None) -> _T:
    """Run `function` on every rank; all of them return, or all raise. Collective.

    Args:
        port: the sharded model whose ranks take part.
        what: the name of the operation, for error messages.
        function: this rank's work, without collectives. With a `nonce` it may take any time: a working rank sends a heartbeat
            through the store, and counts as missing only after ``ShardConfig.timeout`` seconds without one.
        nonce: a text that is equal on all ranks and was never used before.
        key: an object that must be equal on all ranks, or a function that makes it from the result.

    Raises:
        ShardError: `function` failed on a rank. That rank raises its own exception, an OSError as a :class:`CheckpointError`;
            the other ranks raise an error that quotes it, see :func:`.consensus.agree`.
    """
    barrier = heartbeat_barrier(port, nonce)

    def work() -> _T:
        with _at_work(barrier), port.operations.unnoted():
            return function()

    where = f"rank {port.collectives.world_rank}: {what}"
    result, own_key, error = _attempt(work, key, where, " Nothing in training was changed.")
    try:
        agree(port, what, own_key, error)
    finally:
        if barrier is not None:  # every rank has read the messages of all others
            barrier.forget()
    return result  # type: ignore[no-any-return]


def each_rank(function: Callable[[], _T], what: str, seconds: float, key: object = None) -> _T:
    """Run `function` on every rank of the default process group, where no model is sharded; all return, or all raise. Collective.

    The ranks meet in the store, so that a rank that waits says for whom.

    Args:
        function: this rank's work, without collectives.
        what: the name of the operation, for error messages.
        seconds: the time to wait for the other ranks.
        key: an object that must be equal on all ranks, or a function that makes it from the result.

    Raises:
        Exception: `function` failed on a rank. That rank raises its own exception, an OSError as a :class:`CheckpointError`;
            the other ranks raise an error of its class that quotes it, a ShardError for a class that is not of this package.
        MissingRankError: another rank did not come in that time.
        DivergenceError: the keys differ.
    """
    world, me = (dist.get_world_size(), dist.get_rank()) if dist.is_available() and dist.is_initialized() else (1, 0)

    def text_of_key(found: _T) -> str:
        return repr(key(found) if callable(key) else key)

    result, text, error = _attempt(function, text_of_key, f"rank {me}: {what}")
    answer = {"key": text} if error is None else {"error": type(error).__name__, "text": str(error)}
    texts = {me: json.dumps(answer)}
    if world > 1:
        _, texts = exchange_texts(list(range(world)), "torch_shard/each_rank", texts[me], seconds, what)
    if error is not None:
        raise error
    found = [json.loads(texts[rank]) for rank in range(world)]
    for rank, other in enumerate(found):
        if "error" in other:
            raise getattr(errors, other["error"], errors.ShardError)(f"rank {rank} failed: {other['text']}")
    keys = [other["key"] for other in found]
    if len(set(keys)) > 1:
        raise errors.DivergenceError(f"{what}: the ranks passed different arguments: {keys}.")
    return result  # type: ignore[no-any-return]


def _attempt(
    function: Callable[[], Any], key: object, where: str, remark: str = ""
) -> tuple[Any, Any, Exception | None]:
    """Call `function`; return its result, the key, and the error if one of them failed.

    An OSError becomes a :class:`CheckpointError` with the text of the error between `where` and `remark`.
    """
    try:
        result = function()
        return result, key(result) if callable(key) else key, None
    except OSError as problem:
        error = CheckpointError(f"{where}: {problem}.{remark}")
        error.__cause__ = problem
        return None, None, error
    except Exception as problem:
        return None, None, problem


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """Stop Python's cycle collector inside this context, for work with plans of thousands of entries.

    So many new objects would make the collector look at all objects of the program, for some tenths of a second on one rank
    after the other. It would find nothing, because plans are in no cycles.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def heartbeat_barrier(port: ModelPort, nonce: str, own_connection: bool = False) -> HeartbeatBarrier | None:
    """Return a barrier of the model's ranks; None if there is no other rank, or no `nonce`.

    With `own_connection` the barrier has a connection of its own to the store, so that it doesn't wait while this process
    waits for another key of the store.
    """
    c = port.collectives
    if c.world == 1 or not nonce:
        return None
    key = f"{c.watchdog.channels['control'].groups.key}/checkpoint/{nonce}"
    store = default_store()
    return HeartbeatBarrier(store.clone() if own_connection else store, key, c.world_rank, c.world, c.watchdog.timeout)


@contextlib.contextmanager
def _at_work(barrier: HeartbeatBarrier | None) -> Iterator[None]:
    """Send a heartbeat while the body runs; leave when all ranks have ended their bodies, or a rank is missing."""
    if barrier is None:
        yield
        return
    try:
        with barrier.heartbeat():
            yield
    finally:
        # Errors are suppressed here, because the vote that follows reports them.
        with contextlib.suppress(RuntimeError, MissingRankError):
            barrier.post("done")
            barrier.wait("done", list(range(barrier.world)))


# -- objects ----------------------------------------------------------------------------------------------------------


def broadcast(port: ModelPort, value: _T, what: str, source: int = 0) -> _T:
    """Return the object of the rank `source` on every rank. Collective."""
    values = [value]
    if port.collectives.world > 1:
        _exchange(port.collectives, what, dist.broadcast_object_list, values, source=source)
    return values[0]


def gather(port: ModelPort, value: _T, what: str) -> list[_T] | None:
    """Return every rank's object, by rank, on rank 0, and None on the other ranks. Collective."""
    c = port.collectives
    values: list[Any] | None = [value] * c.world if c.world_rank == 0 else None
    if c.world > 1:
        _exchange(c, what, dist.gather_object, value, values)
    return values


def _exchange(c: Collectives, what: str, function: Callable[..., Any], *args: Any, source: int = 0) -> None:
    """Call one of torch's collectives of objects, from or to the rank `source`, once all ranks have come. Collective."""
    # torch's function would wait for a missing rank until the process group's timeout, and not name it.
    blocking(c.watchdog, "message", what, dist.all_reduce, torch.zeros(1, device="cpu"))
    try:
        function(*args, c.watchdog.ranks[source], group=c.watchdog.channels["message"].group)
    except RuntimeError as error:
        raise MissingRankError(
            f"rank {c.world_rank}: {what} failed: another rank has probably died; see its log. ({error})"
        ) from error
