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
from torch_shard import Engine
from torch_shard.log import logger

from .._private import PREPARED_ATTRIBUTES, PREPARED_LISTS, plain_optimizer
from ..models import outside_autocast
from ..models.method_overrides import Shadow
from ..models.unwrap import inner
from . import all_arrived

__all__ = ["all_or_nothing"]

_MISSING = object()


@contextlib.contextmanager
def all_or_nothing(accelerator: Any, *objects: Any) -> Iterator[None]:
    """Around the preparation of `objects`: where it raises, they and `accelerator` become what they were before.

    Models that were sharded meanwhile are plain again where all ranks have failed, which is found out within some seconds. Where
    one has failed alone, or was interrupted, they stay sharded, with all that belongs to it, and can be prepared again.
    """
    if id(accelerator) in _inside:  # prepare_model within prepare
        yield
        return
    lists = {name: list(getattr(accelerator, name)) for name in PREPARED_LISTS}
    models = [_Before(m) for m in objects if isinstance(m, nn.Module)]
    number = all_arrived.count("prepare") if models else 0
    _inside.add(id(accelerator))
    try:
        yield
    except BaseException as error:
        for name, entries in lists.items():
            getattr(accelerator, name)[:] = entries
        optimizers = [plain_optimizer(o) for o in objects if isinstance(o, torch.optim.Optimizer)]
        _give_back(models, optimizers, number, error)
        raise
    finally:
        _inside.discard(id(accelerator))


_inside: set[int] = set()  # ids of Accelerators


def _give_back(models: list[_Before], optimizers: list[Any], number: int, error: BaseException) -> None:
    """Collective where one of the models was sharded and the error is one of all ranks."""
    sharded = [number for number, before in enumerate(models) if before.engine() is not None]
    everywhere = False
    if sharded and isinstance(error, Exception):
        # In one process of several that ran out of memory, say, to wait for the others would hide its error.
        everywhere = all_arrived.all_come(f"prepare/{number}/{sharded}", f"prepare has failed ({error!r})")
    for before in models:
        problem: object = None
        if before.engine() is not None:
            problem = "it has failed on this rank alone"
            if everywhere:
                try:
                    before.unshard(optimizers)
                    problem = None
                except Exception as caught:  # the first error is the one to see, and the other models go on
                    problem = caught
        before.restore_attributes(sharded=problem is not None)
        if problem is not None:
            name = type(before.plain).__name__
            logger.warning("prepare failed (%s), and %s stays sharded: %s", error, name, problem)
            note = f"{name} could not be given back, and stays sharded: {problem}"
            getattr(error, "add_note", str)(note)  # from Python 3.11 on


class _Before:
    """What a model was."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.plain = model, inner(model)
        self.was_sharded = torch_shard.engine_of(self.plain) is not None
        modules = {model: None, **dict.fromkeys(self.plain.modules())}
        self.attributes = [(m, {name: m.__dict__.get(name, _MISSING) for name in _kept(m)}) for m in modules]

    def engine(self) -> Engine | None:
        """That of the model, if it was sharded since."""
        return None if self.was_sharded else torch_shard.engine_of(self.plain)

    def restore_attributes(self, sharded: bool) -> None:
        """`sharded`: what sharding has set stays, as layers that compute their activations again, and methods."""
        for module, values in self.attributes:
            if sharded and module not in (self.model, self.plain):
                continue
            original = module.__dict__.get("_original_forward", _MISSING) if sharded else _MISSING
            for name in PREPARED_ATTRIBUTES if sharded else _kept(module):
                value = values.get(name, _MISSING)
                if name == "forward" and original is not _MISSING and getattr(original, "__self__", None) is not module:
                    value = original
                if value is _MISSING:
                    module.__dict__.pop(name, None)
                else:
                    module.__dict__[name] = value

    def unshard(self, optimizers: list[torch.optim.Optimizer]) -> None:
        engine = self.engine()
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
