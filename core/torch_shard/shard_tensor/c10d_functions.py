"""Collectives of torch.distributed that a user calls with ShardTensors: ``dist.all_reduce(p.grad)``, ``dist.broadcast(p, 0)``.

Each rank passes the full tensor, as it would without sharding, and keeps its shard of the result. So the result is that of plain
tensors that are equal on all ranks: a sum is the tensor times the number of ranks.

On torch 2.11 some of these functions (``broadcast``, ``gather``) do not ask ``__torch_function__``, and are errors there.
Tested on torch 2.11, 2.13 and 2.14.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist

from .full_tensor import full_tensors
from .function_call import FunctionCall
from .spec import gather_error, refuse_unreduced

_KEPT = """
all_gather all_gather_coalesced all_gather_into_tensor all_gather_single all_reduce all_reduce_coalesced broadcast gather
gather_single
"""
# These give each rank a different result, and the ranks' shards of these would not be those of one tensor.
_REFUSED = "irecv isend recv reduce reduce_scatter reduce_scatter_single reduce_scatter_tensor scatter send"


def _collective(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run a collective on full copies, and write these back. Collective over all ranks that share the tensors.

    Raises:
        NeedsGatherError: one of the tensors is a gradient whose reduction no_sync() defers, or the ranks' results differ.
    """
    name = func.__name__
    call = FunctionCall(func, name, args, kwargs)
    sharded = call.sharded
    if name in _REFUSED.split():
        why = "gives each rank something else, of which it would keep a shard; use .full_tensor()"
        raise gather_error(sharded, name, why)
    refuse_unreduced(sharded, name)
    copies = full_tensors(sharded, f"{name} of the sharded {sharded[0]._spec.name}")
    work = call.run(sharded, copies)
    if isinstance(work, dist.Work):
        # With async_op=True nothing would copy the result later. Hazard: NCCL writes on a stream of its own; the current stream
        # waits for it here, before the copies below.
        work.wait()
    # All copies are copied back, because these functions don't increment the versions of tensors that they write to.
    with torch.no_grad():
        for t, copy in zip(sharded, copies, strict=True):
            t.copy_(copy)
    return work


COLLECTIVES: dict[Any, Callable[[Any, Any, Any], Any]] = {
    getattr(dist, name): _collective for name in f"{_KEPT} {_REFUSED}".split() if hasattr(dist, name)
}
"""The replacements of functions of torch.distributed, by function."""
