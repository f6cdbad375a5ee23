"""Which engine shards a module, and which runtime a unit belongs to.

The engine is kept on the module itself, so that it goes and is copied with it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, cast

from torch import nn

if TYPE_CHECKING:
    from ..unit.unit import Unit
    from .runtime import Runtime

__all__ = ["engine_for", "engine_of", "forget", "note", "runtime_of"]

_ATTRIBUTE = "_torch_shard_engine"


def engine_of(model: nn.Module) -> Any:
    """Return the engine of a module that was given to ``shard()``; None for any other."""
    return model.__dict__.get(_ATTRIBUTE)


def engine_for(given: object) -> Any:
    """Return the engine of a module, or `given` itself if it is the engine of one; None for anything else."""
    if isinstance(given, nn.Module):
        return engine_of(given)
    model = getattr(given, "model", None)
    return given if isinstance(model, nn.Module) and engine_of(model) is given else None


def note(model: nn.Module, engine: object) -> None:
    """Make `engine` the engine of `model`."""
    # In __dict__, past nn.Module's __setattr__: an engine must neither be a submodule nor appear in the state dict.
    model.__dict__[_ATTRIBUTE] = engine


def forget(model: nn.Module) -> None:
    """Make `model` a module without an engine."""
    model.__dict__.pop(_ATTRIBUTE, None)


def runtime_of(unit: Unit) -> Runtime:
    """Return the runtime of `unit`, which knows it by a narrower type."""
    return cast("Runtime", unit.runtime)
