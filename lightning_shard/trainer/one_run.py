"""A module is in one run at a time: the end of a run within a run would give it back plain, and the outer one train apart."""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from torch_shard.errors import UnitStateError

__all__ = ["one_run_at_a_time", "run_has_ended"]

_running: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Any]] = weakref.WeakKeyDictionary()


def one_run_at_a_time(module: nn.Module, strategy: Any) -> None:
    """Note that `strategy` runs `module`.

    Raises:
        UnitStateError: another strategy does. Nothing has changed.
    """
    other = _running.get(module)
    if other is not None and other() not in (None, strategy):
        raise UnitStateError(
            f"{type(module).__name__} is in the run of another Trainer, which goes on after this one. Evaluate it there "
            "(val_dataloaders, or validation_step and the engine's gathered()), or a copy.deepcopy of it made before that run."
        )
    _running[module] = weakref.ref(strategy)


def run_has_ended(module: nn.Module | None, strategy: Any) -> None:
    """Undo :func:`one_run_at_a_time`, if it was this strategy's."""
    if module is not None:
        running = _running.get(module)
        if running is not None and running() is strategy:
            del _running[module]
