"""Collectives of torch.distributed that a user calls with ShardTensors: ``dist.all_reduce(p.grad)``, ``dist.broadcast(p, 0)``.

Each rank gives the whole tensor, as it would without sharding, and keeps its slice of what came back. So what holds for plain
tensors that are equal on all ranks holds here: a sum is as many times the tensor as there are ranks.

torch 2.11 asks tensors of other classes for some of these only; the others (``broadcast``, ``gather``) are errors there. Tested
on torch 2.11, 2.13 and 2.14.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ..utils.pytree import tensors_in
from .full_tensor import full_tensors, substituted
from .spec import gather_error

if TYPE_CHECKING:
    from .tensor import ShardTensor

__all__ = ["EXCHANGES"]

_KEPT = """
all_gather all_gather_coalesced all_gather_into_tensor all_gather_single all_reduce all_reduce_coalesced broadcast gather
gather_single
"""
# What is left of these is another thing on each rank.
_REFUSED = "irecv isend recv reduce reduce_scatter reduce_scatter_single reduce_scatter_tensor scatter send"


def _exchange(cls: type[ShardTensor], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run the collective on whole copies, and write these back. Collective over all ranks that the tensors are cut among.

    Raises:
        NeedsGatherError: a gradient among them is this rank's own, under no_sync().
    """
    name = func.__name__
    sharded = list({id(t): t for t in tensors_in((args, kwargs)) if isinstance(t, cls)}.values())
    if any(t._shard_state.unreduced for t in sharded):
        raise gather_error([t._spec for t in sharded], name, "needs a gradient that is reduced: it is this rank's own")
    copies = full_tensors(sharded, f"{name} of the sharded {sharded[0]._spec.name}")
    found = {id(t): copy for t, copy in zip(sharded, copies, strict=True)}
    args = tuple(substituted(value, found) for value in args)
    work = func(*args, **{key: substituted(value, found) for key, value in kwargs.items()})
    if isinstance(work, dist.Work):
        # With async_op=True; nobody would copy the result later. Hazard: NCCL writes on a stream of its own, which this makes
        # the current one wait for, before it reads below.
        work.wait()
    # Always, since these functions leave no trace in the version of what they write.
    with torch.no_grad():
        for t, copy in zip(sharded, copies, strict=True):
            t.copy_(copy)
    return work


def _refuse(cls: type[ShardTensor], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The result would be no one tensor's slices.

    Raises:
        NeedsGatherError: always.
    """
    specs = [t._spec for t in tensors_in((args, kwargs)) if isinstance(t, cls)]
    raise gather_error(
        specs, func.__name__, "gives each rank something else, of which it would keep a slice; use .full_tensor()"
    )


EXCHANGES: dict[Any, Callable[[Any, Any, Any, Any], Any]] = {
    getattr(dist, name): run
    for names, run in ((_KEPT, _exchange), (_REFUSED, _refuse))
    for name in names.split()
    if hasattr(dist, name)
}
"""What runs in place of each."""
