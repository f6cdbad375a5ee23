"""Which engines' parameters an optimizer holds.

One optimizer may hold those of several sharded models (``AdamW([*unet.parameters(), *text_encoder.parameters()])``). Its step
is then one step over all of them, which the engine of its first sharded parameter leads: an order that all ranks share.
"""

from __future__ import annotations

import operator
import weakref
from typing import TYPE_CHECKING, Any

from ..runtime import registry
from ..shard_tensor.tensor import ShardTensor
from ..unit.unit import unit_of
from ..utils.weak_id_map import ByObject

if TYPE_CHECKING:
    from ..runtime.runtime import Runtime

__all__ = ["OPEN", "first_runtime", "runtime_of", "runtimes_of"]

OPEN: weakref.WeakSet[Any] = weakref.WeakSet()
"""Runtimes of this process whose engines follow optimizers' steps."""


def runtime_of(param: Any) -> Runtime | None:
    """Of the engine that shards `param`; None where none does, or it is gone. (A copy of a submodule has none.)"""
    unit = unit_of(param)
    if unit is None:
        return None
    runtime = registry.runtime_of(unit)
    return runtime if runtime.steps is not None and runtime.steps() is not None else None


def first_runtime(optimizer: Any) -> Runtime | None:
    """That of the optimizer's first sharded parameter; parameters are looked at until one answers."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            runtime = runtime_of(p)
            if runtime is not None:
                return runtime
    return None


class _Held:
    """What was found last time, and whether it still holds: compared in C, because it is asked in every step."""

    def __init__(self, optimizer: Any) -> None:
        self._groups = [list(group["params"]) for group in optimizer.param_groups]
        found: dict[int, Runtime] = {}
        self._rest: list[Any] = []
        for params in self._groups:
            for p in params:
                runtime = runtime_of(p)
                if runtime is None:
                    self._rest.append(p)
                else:
                    found.setdefault(id(runtime), runtime)
        self._runtimes = [weakref.ref(runtime) for runtime in found.values()]

    def now(self, optimizer: Any) -> list[Runtime] | None:
        """None where groups have changed, or an engine was closed, or another one has taken parameters since."""
        groups = optimizer.param_groups
        if len(groups) != len(self._groups) or not all(
            len(held) == len(group["params"]) and all(map(operator.is_, held, group["params"]))
            for held, group in zip(self._groups, groups, strict=True)
        ):
            return None
        runtimes = [ref() for ref in self._runtimes]
        if not all(runtime is not None and runtime.units for runtime in runtimes):
            return None
        if any(isinstance(p, ShardTensor) and runtime_of(p) is not None for p in self._rest):
            return None
        return runtimes  # type: ignore[return-value]


_known: ByObject[_Held] = ByObject()


def runtimes_of(optimizer: Any) -> list[Runtime]:
    """Those of all sharded parameters that the optimizer holds, in the order of their first ones. Not collective."""
    if len(OPEN) < 2:  # as nearly always; it is this one if any
        first = first_runtime(optimizer)
        return [] if first is None else [first]
    held = _known.get(optimizer)
    runtimes = None if held is None else held.now(optimizer)
    if runtimes is None:
        held = _Held(optimizer)
        _known.set(optimizer, held)
        runtimes = held.now(optimizer) or []
    return runtimes
