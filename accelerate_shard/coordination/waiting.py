"""Waiting for the other ranks as a script does, so that ranks which do different things hear of it at once.

A rank in ``torch.distributed.barrier()`` says nothing about itself. In ``if accelerator.is_main_process:
accelerator.save_state(...)`` with ``accelerator.wait_for_everyone()`` behind it, rank 0 would wait in the one and the others in
the other until the process group's timeout.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

import torch.distributed as dist

from torch_shard import Engine, errors
from torch_shard.frontend import default_store, told_by
from torch_shard.frontend import meet as _meet

__all__ = ["each", "meet"]

T = TypeVar("T")


def each(function: Callable[[], T], what: str, seconds: float) -> T:
    """Run `function`, without collectives, on every rank, before there is an engine; all return, or all raise. Collective.

    Through the store, in which a rank that waits says for whom.

    Args:
        what: the operation, for messages.
        seconds: how long to wait for the others.

    Raises:
        Exception: this rank's own, or an error of its class that quotes another rank's (ShardError for classes of others).
        MissingRankError: another rank did not come in that time.
    """
    world = dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1
    if world == 1:
        return function()
    error: Exception | None = None
    result: Any = None
    try:
        result = function()
    except Exception as problem:  # the other ranks must hear of it
        error = problem
    rank = dist.get_rank()
    # Counted by each rank for itself, as all of them come here in one order.
    number = default_store().add(f"accelerate_shard/each/{rank}", 1)
    own = "" if error is None else json.dumps([type(error).__name__, str(error)])
    told = told_by(list(range(world)), f"accelerate_shard/each/{number}", own, seconds, what)
    if error is not None:
        raise error
    for other, text in told.items():
        if text:
            name, said = json.loads(text)
            kind = getattr(errors, name, errors.ShardError)
            raise kind(f"rank {other} failed: {said}")
    return result  # type: ignore[no-any-return]


def meet(engines: Iterable[Engine], seconds: float, what: str) -> None:
    """Return when all ranks are in `what`; without a sharded model, or where an engine has no say, at once. Collective.

    Args:
        engines: those of the prepared models, the same on all ranks.
        seconds: how long to wait for a rank at least: work of one rank alone may take so long.

    Raises:
        DivergenceError: another rank waits in another operation; names both, and their lines.
        MissingRankError: another rank did not come in that time.
    """
    engine = next(iter(engines), None)
    if engine is not None:
        _meet(engine, seconds, what)
