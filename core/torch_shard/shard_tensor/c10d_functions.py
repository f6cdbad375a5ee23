"""Collectives of torch.distributed that a user calls with ShardTensors: ``dist.all_reduce(p.grad)``, ``dist.broadcast(p, 0)``.

Each rank gives the full tensor, as it would without sharding, and keeps its shard of the result. So the result is that of
plain tensors which are equal on all ranks: a sum is the tensor times the number of ranks.

On torch 2.11 some of these functions (``broadcast``, ``gather``) do not ask ``__torch_function__``, and are errors there.
Tested on torch 2.11, 2.13 and 2.14.
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
# These give each rank another result.
_REFUSED = "irecv isend recv reduce reduce_scatter reduce_scatter_single reduce_scatter_tensor scatter send"


def _exchange(cls: type[ShardTensor], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a collective on full copies, and write these back. Collective over all ranks that share the tensors.

    Raises:
        NeedsGatherError: one of the tensors is a gradient whose reduction no_sync() defers.
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
        # async_op=True: nobody would copy the result later. Hazard: NCCL writes on a stream of its own; this makes the current
        # stream wait for it before the copies below.
        work.wait()
    # All are copied back, because these functions don't count what they write in the tensors' versions.
    with torch.no_grad():
        for t, copy in zip(sharded, copies, strict=True):
            t.copy_(copy)
    return work


def _refuse(cls: type[ShardTensor], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Raise NeedsGatherError: the ranks' results would not be the shards of one tensor."""
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
"""By function of torch.distributed, what runs in its place."""
