"""A ``prepare`` that fails leaves nothing behind: neither in the Accelerator's lists, nor on the models."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import torch_shard
from torch_shard.errors import ShardError

from . import outside_autocast
from ._private import PREPARED_ATTRIBUTES, PREPARED_LISTS, plain_optimizer
from .shadowed import Shadow
from .wrapped import inner

__all__ = ["all_or_nothing"]

_MISSING = object()


@contextlib.contextmanager
def all_or_nothing(accelerator: Any, *objects: Any) -> Iterator[None]:
    """Around the preparation of `objects`: where it raises, they and `accelerator` become what they were before.

    Models that were sharded meanwhile are plain again where the error is one that all ranks have: collective then.
    """
    lists = {name: list(getattr(accelerator, name)) for name in PREPARED_LISTS}
    models = [_Before(m) for m in objects if isinstance(m, nn.Module)]
    try:
        yield
    except BaseException as error:
        for name, entries in lists.items():
            getattr(accelerator, name)[:] = entries
        for before in models:
            before.restore_attributes()
        # Those of settings and models are raised on all ranks. One rank that ran out of memory, or was interrupted, is alone:
        # to wait for the others would hide its error.
        if isinstance(error, (ShardError, ValueError, TypeError)):
            optimizers = [plain_optimizer(o) for o in objects if isinstance(o, torch.optim.Optimizer)]
            for before in models:
                before.unshard(optimizers)
        raise


class _Before:
    """What a model was."""

    def __init__(self, model: nn.Module) -> None:
        self.plain = inner(model)
        self.was_sharded = torch_shard.engine_of(self.plain) is not None
        modules = {model: None, **dict.fromkeys(self.plain.modules())}
        self.attributes = [(m, {name: m.__dict__.get(name, _MISSING) for name in _kept(m)}) for m in modules]

    def restore_attributes(self) -> None:
        for module, values in self.attributes:
            for name in _kept(module):
                value = values.get(name, _MISSING)
                if value is _MISSING:
                    module.__dict__.pop(name, None)
                else:
                    module.__dict__[name] = value

    def unshard(self, optimizers: list[torch.optim.Optimizer]) -> None:
        engine = None if self.was_sharded else torch_shard.engine_of(self.plain)
        if engine is not None:
            outside_autocast.unregister(self.plain)
            engine.close(*optimizers)


def _kept(module: nn.Module) -> list[str]:
    """The attributes that ``prepare`` sets, and methods that it replaces."""
    return [*PREPARED_ATTRIBUTES, *(name for name, value in module.__dict__.items() if isinstance(value, Shadow))]
