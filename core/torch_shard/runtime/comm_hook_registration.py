"""Registration of the user's own gradient reduction: ``engine.register_comm_hook``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..comm.comm_hook import CommHook, hook_name
from ..comm.consensus import agree
from ..errors import ConfigError, UnitStateError

if TYPE_CHECKING:
    from .runtime import Runtime


def register(runtime: Runtime, state: Any, hook: Callable[..., Any]) -> None:
    """Register `hook`, as :meth:`torch_shard.Engine.register_comm_hook` says. Collective."""
    what = "engine.register_comm_hook"
    error: Exception | None = None
    gradients = [flat.gradients for flat in runtime.flats]
    try:
        if not callable(hook):
            raise ConfigError(f"hook must be callable, not {type(hook).__name__}.")
        if any(g.hook is not None for g in gradients):
            raise ConfigError("hook: a communication hook is registered already, and an engine can have only one.")
        quantized = runtime.config.quantized
        if quantized is not None and quantized.gradients is not None:
            raise ConfigError(
                f"hook: ShardConfig.quantized has gradients={quantized.gradients!r}, which a communication hook would "
                "replace; leave one of them out."
            )
        if any(g.waits for g in gradients):
            raise UnitStateError(
                f"rank {runtime.collectives.world_rank}: {what} while gradients wait for their reduction (no_sync()); register "
                "before the first backward, or after one that reduces."
            )
    except Exception as problem:
        error = problem
    agree(runtime, what, hook_name(hook), error)
    runtime.reductions.hook = made = CommHook(state, hook)
    for each in gradients:
        each.reduce_by(made)
