"""Broadcasts of many small tensors from rank 0, with one collective for each dtype."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from .collectives import Collectives

Coalesced = list[tuple[list[torch.Tensor], torch.Tensor, bool]]
"""For each dtype: its tensors, the flat tensor that is sent for them, and True if that is a view of a single tensor (no copy)."""


def coalesce(collectives: Collectives, tensors: Iterable[torch.Tensor]) -> Coalesced:
    """Return `tensors` grouped by dtype, for :func:`broadcast`. Not collective.

    The memory for the broadcast is allocated here; :func:`broadcast` takes hardly any more.
    """
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel() and tensor.device.type != "meta":
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
    device, coalesced = collectives.device, []
    for group in by_dtype.values():
        in_place = len(group) == 1 and group[0].is_contiguous() and group[0].device == device
        # `.data` bypasses the version counters. As under DDP, a graph that has saved a buffer stays usable (say the loss of two
        # forwards through running statistics).
        flat = group[0].data.view(-1) if in_place else torch.cat([t.data.reshape(-1).to(device) for t in group])
        coalesced.append((group, flat, in_place))
    return coalesced


def broadcast_coalesced(
    collectives: Collectives,
    tensors: list[torch.Tensor],
    what: str,
    arrived: bool = False,
    within_data_parallel: bool = False,
) -> None:
    """Overwrite `tensors` on all ranks with the values of rank 0, in one broadcast per dtype. Collective.

    Args:
        collectives: the collectives of the engine.
        tensors: the tensors to overwrite, in the same order on all ranks.
        what: the name of the operation, for error messages.
        arrived: True if all ranks are known to have reached this call.
        within_data_parallel: take the values of the first rank of this rank's data-parallel group instead of rank 0's, see
            :mod:`torch_shard.layout.rank_topology`.
    """
    c = collectives
    if (c.data_parallel_size if within_data_parallel else c.world) > 1:
        broadcast(c, coalesce(c, tensors), what, arrived, within_data_parallel)


def broadcast(
    collectives: Collectives, coalesced: Coalesced, what: str, arrived: bool = False, within_data_parallel: bool = False
) -> None:
    """Broadcast the result of :func:`coalesce`, as :func:`broadcast_coalesced` does. Collective."""
    c = collectives
    if (c.data_parallel_size if within_data_parallel else c.world) == 1:
        return
    # The ranks of a replica reduce together; where each rank has a replica, those of its data-parallel group do.
    divided = within_data_parallel and c.topology.data_parallel_groups > 1
    channel = c.reduce_channel if divided and c.reduce_channel is not None else c.watchdog.channels["reduce"]
    first = min(channel.members)
    if not arrived:
        c.watchdog.host_barrier(what)
    with torch.no_grad():
        for group, flat, in_place in coalesced:
            # Sent as bytes, because backends don't know every dtype that a model may hold.
            raw = flat.view(torch.uint8) if flat.dtype is not torch.bool else flat.to(torch.uint8)
            c.broadcast(raw, first, what, channel, ordered=c.watchdog.on_streams)
            if flat.dtype is torch.bool:
                flat.copy_(raw)
            if in_place:
                continue
            at = 0
            for tensor in group:
                tensor.data.copy_(flat[at : at + tensor.numel()].view(tensor.shape))
                at += tensor.numel()
