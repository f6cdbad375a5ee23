"""The engines whose parameters an optimizer holds.

One optimizer may hold the parameters of several sharded models (``AdamW([*unet.parameters(), *text_encoder.parameters()])``).
Its step is then one step over all of them, which the engine of its first sharded parameter leads: an order that all ranks share.
"""

from __future__ import annotations

import operator
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from ..runtime import registry
from ..shard_tensor.tensor import ShardTensor
from ..unit.unit import unit_of

if TYPE_CHECKING:
    from ..runtime.runtime import Runtime

OPEN: weakref.WeakSet[Any] = weakref.WeakSet()
"""The runtimes of this process whose engines follow optimizers' steps."""

_unit_ref = operator.attrgetter("_unit_ref")


def params_of(optimizer: Any) -> list[Any]:
    """Return the optimizer's parameters, in the order in which torch numbers them."""
    return [p for group in optimizer.param_groups for p in group["params"]]


def same_params(groups: Sequence[dict[str, Any]], listed: Sequence[Sequence[Any]]) -> bool:
    """Return True if `groups` have the parameters in `listed`, one list for each group, in the same order."""
    return len(groups) == len(listed) and all(
        len(group["params"]) == len(params) and all(map(operator.is_, group["params"], params))
        for group, params in zip(groups, listed, strict=True)
    )


def open_runtime_of(param: Any) -> Runtime | None:
    """Return the runtime that shards `param`, or None if there is none or it is closed. A copy of a submodule has none."""
    unit = unit_of(param)
    if unit is None:
        return None
    runtime = registry.runtime_of(unit)
    return runtime if runtime.steps() is not None else None


def first_runtime(optimizer: Any) -> Runtime | None:
    """Return the runtime of the optimizer's first sharded parameter."""
    for group in optimizer.param_groups:
        for p in group["params"]:
            runtime = open_runtime_of(p)
            if runtime is not None:
                return runtime
    return None


def runtimes_of(optimizer: Any) -> list[Runtime]:
    """Return the runtimes of all sharded parameters of the optimizer, in the order of their first ones. Not collective."""
    if len(OPEN) < 2:  # the usual case, in each step
        first = first_runtime(optimizer)
        return [] if first is None else [first]
    params = [p for p in params_of(optimizer) if isinstance(p, ShardTensor)]
    # One parameter of each unit is enough; all parameters of a unit refer to it by one object.
    params = list(dict(zip(map(id, map(_unit_ref, params)), params, strict=True)).values())
    return list(dict.fromkeys(runtime for runtime in map(open_runtime_of, params) if runtime is not None))
