"""Full values outside of forward and backward: from shards to full tensors and back.

`engine.gathered`, full state dicts and `engine.close` share these functions. None of them touches a module.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from ..comm.broadcast_buffers import broadcast_coalesced
from ..errors import ShardError
from ..runtime.runtime import Runtime
from ..shard_tensor.state import is_unreduced
from ..shard_tensor.tensor import ShardTensor
from ..shard_tensor.unsharded_param import own_grad, set_own_grad
from ..unit.flat_buffer import FlatBuffer
from ..unit.full_values import full_flat
from ..unit.unit import State, Unit


@contextlib.contextmanager
def gathered_values(runtime: Runtime, unit: Unit) -> Iterator[list[torch.Tensor]]:
    """Give the present values of each flat buffer of `unit`, unsharded, in the stored dtype, for reading. Collective."""
    in_place = any(summons.in_place for summons in unit.summons)
    if not unit.exact or (unit.summons and not in_place):  # modules compute with less precise values, or with copies
        yield [full_flat(flat, f"the all-gather of unit {unit.name!r}") for flat in unit.flats]
        return
    if in_place or not unit.gathers:
        yield [flat.full for flat in unit.flats]
        return
    keep = refill(runtime, unit)
    unit.wait()
    try:
        yield [flat.full for flat in unit.flats]
    finally:
        if not keep:
            unit.reshard()


def refill(runtime: Runtime, unit: Unit) -> bool:
    """Start an unshard with the present values; return True if a running backward needs the unit afterwards. Collective."""
    keep = bool(unit.uses or unit.kept) and unit.state is not State.SHARDED
    if unit.state is not State.SHARDED:
        # The unit may have been unsharded before an edit of the shards, or be prefetched on some ranks only.
        unit.wait()
        unit.reshard()
    unit.unshard()
    if not keep:
        runtime.schedule.gathered.pop(unit.index, None)
    return keep


# -- full to shards ---------------------------------------------------------------------------------------------------


def scatter_shards(flat: FlatBuffer, full: torch.Tensor | None, into: torch.Tensor, source: int, what: str) -> None:
    """Send each rank its shard of rank `source`'s full buffer. Collective.

    Args:
        flat: the buffer whose layout applies.
        full: on rank `source` the full buffer, on any device; not read on other ranks.
        into: receives this rank's shard.
        source: the sending rank.
        what: for messages.
    """
    c = flat.collectives
    if not into.numel():
        return
    if c.world == 1:
        assert full is not None
        into.copy_(flat.own_slot(full))
        return
    me = c.world_rank == source
    with torch.no_grad():
        raw = _bytes(into.to(c.device).contiguous())
        data = _bytes(full.to(c.device)) if me and full is not None else None
        if c.size == 1:
            if data is not None:
                raw.copy_(data)
            c.broadcast(raw, source, what)
        else:
            slots = None if data is None else data.view(c.size, -1)
            parts = None if slots is None else [slots[position] for position in c.topology.positions()]
            c.scatter(raw, parts, source, what)
        if raw.data_ptr() != into.data_ptr():
            into.copy_(raw.view(into.dtype))


def broadcast_bytes(runtime: Runtime, values: torch.Tensor, source: int, what: str) -> torch.Tensor:
    """Broadcast a small uint8 CPU tensor from rank `source`, and return it. Collective."""
    c = runtime.collectives
    if c.world == 1:
        return values
    c.broadcast_message(values, source, what)
    return values


def unify_replicas(flat: FlatBuffer, what: str, own: torch.Tensor | None = None) -> None:
    """Give all replicas the values of the first one, because random edits may differ between ranks. Collective.

    Args:
        flat: the buffer.
        what: for messages.
        own: this rank's values, of the shard's size; None for the shard itself.
    """
    c = flat.collectives
    held = flat.shard if own is None else own
    own = held.to(c.device)
    # Parameters that tensor parallelism does not cut are the same in all data-parallel groups, too.
    channel = c.tp_replica_channel if c.tp_replica_channel is not None and not flat.split else c.replica_channel
    if not flat.sharded:
        broadcast_coalesced(c, [own], what, within_data_parallel=flat.split)
    elif channel is not None:
        c.send_waiting()
        c.watchdog.host_barrier(what)
        if own.numel():
            c.broadcast(_bytes(own), min(channel.members), what, channel, ordered=c.watchdog.on_streams)
    if own is not held:
        held.copy_(own)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)  # every dtype a model may hold can travel as bytes


def grad_of(param: torch.Tensor) -> ShardTensor | None:
    """Return the sharded gradient of a sharded parameter, past the properties of ShardTensor."""
    with torch._C.DisableTorchFunctionSubclass():
        return own_grad(param)  # type: ignore[return-value]


def reduced_grad_of(param: torch.Tensor) -> Any:
    """Return the gradient of a sharded or plain parameter.

    Raises:
        ShardError: no_sync() defers the gradient's reduction.
    """
    grad = grad_of(param)
    if is_unreduced(grad):
        spec = param._spec  # type: ignore[attr-defined]
        raise ShardError(
            f"rank {spec.world_rank}: the gradient of {spec.name} is still this rank's own, because the last backward ran "
            "under engine.no_sync(). Clip, gather or close after the backward that reduces."
        )
    return grad


def local_grads(flat: FlatBuffer) -> list[torch.Tensor | None]:
    """Return this rank's shards of the reduced gradients, one for each parameter, None where there is no gradient.

    Raises:
        ShardError: no_sync() defers a gradient's reduction.
    """
    return [None if g is None else g._local for g in map(reduced_grad_of, flat.params)]


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
