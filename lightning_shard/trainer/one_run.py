"""A guard against nested runs of one module.

At its end the inner run would unshard the module, and the outer run would then train without reducing gradients.
"""

from __future__ import annotations

import weakref
from typing import Any

from torch import nn

from torch_shard.errors import UnitStateError

_running: weakref.WeakKeyDictionary[nn.Module, weakref.ref[Any]] = weakref.WeakKeyDictionary()
"""The strategy that runs each module."""


def enter_run(module: nn.Module, strategy: Any) -> None:
    """Note that `strategy` runs `module`.

    Raises:
        UnitStateError: another strategy runs the module. Nothing has changed.
    """
    other = _running.get(module)
    if other is not None and other() not in (None, strategy):
        raise UnitStateError(
            f"{type(module).__name__} is in the run of another Trainer, which goes on after this one. Evaluate it there "
            "(val_dataloaders, or validation_step and the engine's gathered()), or a copy.deepcopy of it made before that run."
        )
    _running[module] = weakref.ref(strategy)


def leave_run(module: nn.Module | None, strategy: Any) -> None:
    """Undo :func:`enter_run`, if `strategy` runs `module`."""
    if module is not None:
        running = _running.get(module)
        if running is not None and running() is strategy:
            del _running[module]
