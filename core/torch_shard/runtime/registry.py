"""The engine of a module, and the runtime of a unit.

The module keeps its engine itself, so that the engine lives as long as the module and is copied with it. A part of a sharded
model holds shards, which lead to their runtime. A table leads from the runtime to its engine, and keeps neither alive.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

from torch import nn

from ..shard_tensor.tensor import ShardTensor

if TYPE_CHECKING:
    from ..unit.unit import Unit
    from .runtime import Runtime

ATTRIBUTE = "_torch_shard_engine"
"""The attribute of a sharded module that holds its engine."""
# The engine of each runtime; neither is kept alive.
_ENGINES: weakref.WeakKeyDictionary[Runtime, weakref.ref[Any]] = weakref.WeakKeyDictionary()


def engine_of(model: nn.Module) -> Any:
    """Return the engine of a module that was given to ``shard()``; None for any other."""
    return model.__dict__.get(ATTRIBUTE)


def engine_for(given: object) -> Any:
    """Return the engine of a module, or `given` itself if it is the engine of one; None for anything else."""
    if isinstance(given, nn.Module):
        return engine_of(given)
    model = getattr(given, "model", None)
    return given if isinstance(model, nn.Module) and engine_of(model) is given else None


def note(model: nn.Module, engine: object) -> None:
    """Make `engine` the engine of `model`."""
    # The engine goes to __dict__, past nn.Module.__setattr__: it must neither be a submodule nor appear in the state dict.
    model.__dict__[ATTRIBUTE] = engine


def forget(model: nn.Module) -> None:
    """Make `model` a module without an engine."""
    model.__dict__.pop(ATTRIBUTE, None)


def runtime_of(unit: Unit) -> Runtime:
    """Return the runtime of `unit`, where the unit's own attribute has the type of the port only."""
    return unit.runtime  # type: ignore[return-value]  # without cast(), which is a call: this is on the hot path


def note_runtime(runtime: Runtime, engine: object) -> None:
    """Make `engine` the engine of `runtime`; neither is kept alive."""
    _ENGINES[runtime] = weakref.ref(engine)


def engine_for_runtime(runtime: Runtime) -> Any:
    """Return the engine of `runtime`, or None if it is gone."""
    found = _ENGINES.get(runtime)
    return None if found is None else found()


def engine_holding(module: nn.Module) -> Any:
    """Return the engine whose shards `module` holds now: the sharded model, a part of it, or a module around it.

    None if it holds none, as inside ``engine.gathered()``, where parameters are full. Not collective.
    """
    for param in module.parameters():
        unit: Any = param._unit if isinstance(param, ShardTensor) else None
        if unit is not None:
            return engine_for_runtime(unit.runtime)
    return None
