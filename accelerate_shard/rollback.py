"""A ``prepare`` that fails leaves nothing behind: neither in the Accelerator's lists, nor on the models."""

from __future__ import annotations

import contextlib
import copy
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

import torch_shard
from torch_shard.errors import ShardError
from torch_shard.log import logger

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
                try:
                    before.unshard(optimizers)
                except Exception as problem:  # the first error is the one to see, and the other models go on
                    name = type(before.plain).__name__
                    logger.warning("prepare failed (%s), and %s stays sharded: %s", error, name, problem)
                    note = f"{name} could not be given back, and stays sharded: {problem}"
                    getattr(error, "add_note", str)(note)  # from Python 3.11 on
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
            own = {id(p) for unit in engine.units for p in unit.params}
            having = [o for o in optimizers if any(id(p) in own for p in o.state)]
            parts = [_part(o, own) for o in having]
            engine.close(*parts)
            for whole, part in zip(having, parts, strict=True):
                whole.state.update(part.state)


def _part(optimizer: torch.optim.Optimizer, own: set[int]) -> torch.optim.Optimizer:
    """`optimizer` without parameters of other models, or of none: itself where it has only those of these ids."""
    if all(id(p) in own for group in optimizer.param_groups for p in group["params"]):
        return optimizer
    part = copy.copy(optimizer)
    part.state = defaultdict(dict, {p: state for p, state in optimizer.state.items() if id(p) in own})
    part.param_groups = [
        {**group, "params": [p for p in group["params"] if id(p) in own]} for group in optimizer.param_groups
    ]
    return part


def _kept(module: nn.Module) -> list[str]:
    """The attributes that ``prepare`` sets, and methods that it replaces."""
    return [*PREPARED_ATTRIBUTES, *(name for name, value in module.__dict__.items() if isinstance(value, Shadow))]
