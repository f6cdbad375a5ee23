"""Barriers that tell a rank what the others wait for.

A rank in ``torch.distributed.barrier()`` does not say where it is. With ``if accelerator.is_main_process:
accelerator.save_state(...)`` and ``accelerator.wait_for_everyone()`` behind it, rank 0 would wait in the first call and the other
ranks in the second, until the process group's timeout.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch.distributed as dist

from torch_shard import Engine, errors
from torch_shard.frontend import exchange_texts, wait_for_all

__all__ = ["barrier", "each"]

T = TypeVar("T")


def each(function: Callable[[], T], what: str, seconds: float, key: object = None) -> T:
    """Run `function`, without collectives, on every rank, where there is no engine; all return, or all raise. Collective.

    Through the store, in which a rank that waits says for whom.

    Args:
        function: this rank's work.
        what: the operation, for messages.
        seconds: the time to wait for the others.
        key: a value that must be equal on all ranks; a function is called with the result.

    Raises:
        Exception: this rank's own, or an error of its class that quotes another rank's (ShardError for classes of others).
        MissingRankError: another rank did not come in that time.
        DivergenceError: the ranks have other keys.
    """
    world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    error: Exception | None = None
    result: Any = None
    answer: dict[str, str] = {}
    try:
        result = function()
        answer["key"] = repr(key(result) if callable(key) else key)
    except Exception as problem:  # the other ranks must hear of it
        error = problem
        answer.update(error=type(error).__name__, text=str(error))
    if world > 1:
        _, texts = exchange_texts(list(range(world)), "accelerate_shard/each", json.dumps(answer), seconds, what)
    if error is not None:
        raise error
    if world > 1:
        found = [json.loads(texts[rank]) for rank in range(world)]
        for rank, other in enumerate(found):
            if "error" in other:
                raise getattr(errors, other["error"], errors.ShardError)(f"rank {rank} failed: {other['text']}")
        keys = [other["key"] for other in found]
        if len(set(keys)) > 1:
            raise errors.DivergenceError(f"{what}: the ranks passed different arguments: {keys}.")
    return result  # type: ignore[no-any-return]


def barrier(engines: Iterable[Engine], seconds: float, what: str) -> None:
    """Return when all ranks are in `what`; at once without a sharded model, or where engines don't compare. Collective.

    Args:
        engines: the engines of the prepared models, the same on all ranks.
        seconds: the least time to wait for a rank, since the work of one rank alone may take so long.

    Raises:
        DivergenceError: another rank waits in another operation; names both, and their lines.
        MissingRankError: another rank did not come in that time.
    """
    engine = next(iter(engines), None)
    if engine is not None:
        wait_for_all(engine, seconds, what)
