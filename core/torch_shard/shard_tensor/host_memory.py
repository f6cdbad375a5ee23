"""Shards in host memory, which may be written to in the background; see :mod:`torch_shard.offload.pending_writes`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ..offload.pending_writes import PendingWrites


def flat_of(tensor: Any) -> Any:
    """Return the flat tensor, if any, that the shard of a sharded tensor is a part of. Wait for nothing."""
    if tensor is None:
        return None
    state = tensor._shard_state
    return state.flat if state.waits_for is None else state.waits_for.shard_and_flat(tensor)[1]


def shard_of(tensor: Any) -> Any:
    """Return the shard of a sharded tensor. Wait for nothing that is written to it."""
    state = tensor._shard_state
    return state.local if state.waits_for is None else state.waits_for.shard_and_flat(tensor)[0]


def pending_writes_of(tensor: Any) -> PendingWrites | None:
    """Return the background work on the memory of a sharded tensor; None if that is no host memory."""
    state = tensor._shard_state
    found: PendingWrites | None = state.waits_for
    if found is None:
        found = state.pending_writes
    if found is None:
        found = getattr(state.flat, "_pending_writes", None)  # a gradient's or state's
    if found is None and state.unit_ref is not None:
        unit = state.unit_ref()
        host = None if unit is None or unit.host is None else unit.find(tensor)[0].host
        found = None if host is None else host.pending_writes
    return found
