"""The sharded module, and its engine, within an object that ``prepare`` has returned."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

from torch import nn

import torch_shard
from torch_shard import Engine

from .._private import compiled_inner


def engine_of(model: nn.Module) -> Engine | None:
    """Return the engine of a prepared model, compiled or not; None if it is not sharded. Not collective.

    None for its parts, too; :func:`torch_shard.frontend.engine_holding` finds the engine whose shards any module holds.
    """
    return torch_shard.engine_of(compiled_inner(model))


def engines_of(models: Iterable[nn.Module]) -> list[Engine]:
    """Return the engines of those of `models` that are sharded, in their order. Not collective."""
    return [engine for engine in map(engine_of, models) if engine is not None]


class _Prepared:
    """Accelerate's mark of a prepared model, which is true as long as the model is sharded.

    Under DDP the mark is on the wrapper, which is not saved with the user's module. Here it is on that module, and a program that
    loads the module, or has closed its engine, must be able to prepare it again.
    """

    in_plain_module = None  # it is left out of a pickle

    def __init__(self, model: nn.Module) -> None:
        self._model = weakref.ref(model)  # weak, so that models are no reference cycles

    def __bool__(self) -> bool:
        model = self._model()
        return model is not None and engine_of(model) is not None

    def __deepcopy__(self, memo: dict[int, Any]) -> _Prepared:
        model: Any = self._model()
        return _Prepared(memo.get(id(model), model))


def mark_prepared(model: nn.Module) -> None:
    """Replace the mark that Accelerate has set on a prepared model by ours. Not collective."""
    model._is_accelerate_prepared = _Prepared(compiled_inner(model))  # type: ignore[assignment]
