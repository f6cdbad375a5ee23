"""Broadcasts of many small tensors from rank 0, one collective for each dtype."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from .collectives import Collectives

Coalesced = list[tuple[list[torch.Tensor], torch.Tensor]]
"""Tensors of one dtype, and a flat tensor that is sent for them: the only one's own memory, or a copy of all."""


def coalesce(collectives: Collectives, tensors: Iterable[torch.Tensor]) -> Coalesced:
    """Return `tensors` by dtype, for :func:`broadcast`, which takes hardly any memory then. Not collective."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for tensor in tensors:
        if tensor.numel() and tensor.device.type != "meta":
            by_dtype.setdefault(tensor.dtype, []).append(tensor)
    device, found = collectives.device, []
    for group in by_dtype.values():
        alone = len(group) == 1 and group[0].is_contiguous() and group[0].device == device
        # Through `.data`, past the version counters: as under DDP a graph that has saved a buffer stays usable (the loss of two
        # forwards through running statistics).
        flat = group[0].data.view(-1) if alone else torch.cat([t.data.reshape(-1).to(device) for t in group])
        found.append((group, flat))
    return found


def broadcast_coalesced(
    collectives: Collectives, tensors: list[torch.Tensor], what: str, met: bool = False, within_plane: bool = False
) -> None:
    """Collective. Overwrite `tensors` on all ranks with rank 0's values, one broadcast per dtype. `met`: every rank is
    known to be here. `within_plane`: with those of the first rank that computes with the same parts, see
    :mod:`.layout.rank_topology`."""
    c = collectives
    if (c.averaged if within_plane else c.world) > 1:
        broadcast(c, coalesce(c, tensors), what, met, within_plane)


def broadcast(
    collectives: Collectives, coalesced: Coalesced, what: str, met: bool = False, within_plane: bool = False
) -> None:
    """Do :func:`broadcast_coalesced` with what :func:`coalesce` has returned. Collective."""
    c = collectives
    if (c.averaged if within_plane else c.world) == 1:
        return
    channel = c.plane_channel if within_plane and c.plane_channel is not None else c.watch.channels["reduce"]
    first = min(channel.members)
    if not met:
        c.watch.meet(what)
    with torch.no_grad():
        for group, flat in coalesced:
            # Bytes, so that every dtype a model may hold can travel.
            raw = flat.view(torch.uint8) if flat.dtype is not torch.bool else flat.to(torch.uint8)
            c.broadcast(raw, first, what, channel, ordered=c.watch.polls)
            if flat.dtype is torch.bool:
                flat.copy_(raw)
            if flat.data_ptr() == group[0].data_ptr():  # received in place
                continue
            at = 0
            for tensor in group:
                tensor.data.copy_(flat[at : at + tensor.numel()].view(tensor.shape))
                at += tensor.numel()
