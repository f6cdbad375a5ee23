"""Full values that go back into shards, and the reduced gradients of sharded parameters.

None of these functions touches a module.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Any

import torch

from ..comm.broadcast_buffers import broadcast_coalesced
from ..errors import ShardError
from ..shard_tensor.state import is_unreduced
from ..shard_tensor.tensor import ShardTensor
from ..shard_tensor.unsharded_param import own_grad, set_own_grad
from ..unit.flat_buffer import FlatBuffer


def scatter_shards(flat: FlatBuffer, full: torch.Tensor | None, into: torch.Tensor, source: int, what: str) -> None:
    """Send each rank its shard of rank `source`'s full buffer; there must be several ranks. Collective.

    Args:
        flat: the buffer whose layout applies.
        full: the full buffer of rank `source`, on any device; not read on other ranks.
        into: receives this rank's shard.
        source: the sending rank.
        what: the operation, for messages.
    """
    c = flat.collectives
    if not into.numel():
        return
    with torch.no_grad():
        slots = full.to(c.device).view(c.size, -1) if full is not None and c.world_rank == source else None
        own = into.to(c.device).contiguous()
        parts = None if slots is None else [_bytes(slots[position]) for position in c.topology.positions()]
        c.scatter(_bytes(own), parts, source, what)
        if own is not into:
            into.copy_(own)


def unify_replicas(flat: FlatBuffer, values: torch.Tensor, what: str) -> None:
    """Give all replicas the first one's shard, because random edits may differ between ranks. Collective.

    Args:
        flat: the buffer whose layout applies.
        values: this rank's shard; overwritten.
        what: the operation, for messages.
    """
    c = flat.collectives
    own = values.to(c.device)
    # Parameters that tensor parallelism does not cut are the same in all data-parallel groups, too.
    channel = c.tp_replica_channel if c.tp_replica_channel is not None and not flat.split else c.replica_channel
    if not flat.sharded:
        broadcast_coalesced(c, [own], what, within_data_parallel=flat.split)
    elif channel is not None:
        c.send_waiting()
        c.watchdog.host_barrier(what)
        if own.numel():
            c.broadcast(_bytes(own), min(channel.members), what, channel, ordered=c.watchdog.on_streams)
    if own is not values:
        values.copy_(own)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)  # every dtype a model may hold can travel as bytes


# -- gradients ---------------------------------------------------------------------------------------------------------


def reduced_grad_of(param: torch.Tensor) -> Any:
    """Return the gradient of a sharded or plain parameter.

    Raises:
        ShardError: no_sync() defers the gradient's reduction.
    """
    with torch._C.DisableTorchFunctionSubclass():
        grad = own_grad(param)
    if is_unreduced(grad):
        spec = param._spec  # type: ignore[attr-defined]
        raise ShardError(
            f"rank {spec.world_rank}: the gradient of {spec.name} is still this rank's own, because the last backward ran "
            "under engine.no_sync(). Clip, gather or close after the backward that reduces."
        )
    return grad


def local_grads(flat: FlatBuffer, chosen: Container[int] | None = None) -> list[torch.Tensor | None]:
    """Return this rank's shards of the reduced gradients, one for each parameter, None where there is no gradient.

    `chosen`: ids of the parameters that count; None for all.

    Raises:
        ShardError: no_sync() defers a gradient's reduction.
    """
    params = flat.params if chosen is None else [p for p in flat.params if id(p) in chosen]
    return [None if g is None else g._local for g in map(reduced_grad_of, params)]


def set_grad(param: ShardTensor, local: torch.Tensor | None) -> None:
    """Make the shard `local` the gradient; it is copied into an existing gradient of its dtype, else kept."""
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        existing: Any = own_grad(param)
        if local is None:
            set_own_grad(param, None)
        elif existing is not None and existing._local.dtype == local.dtype:
            existing._local.copy_(local)
        else:
            set_own_grad(param, ShardTensor(local, param._spec))
