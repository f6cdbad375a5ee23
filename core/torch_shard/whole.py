"""Whole values outside compute: from slices to whole tensors and back, and failing together.

What `engine.gathered`, full state dicts and `engine.close` share. Nothing here touches a module.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .buffers import broadcast_coalesced
from .errors import ShardError
from .flat_buffer import FlatBuffer
from .leaf import own_grad, set_own_grad
from .runtime import Runtime
from .shard_tensor import ShardTensor
from .unit import State, Unit
from .watch import blocking

# -- together or not at all -------------------------------------------------------------------------------------------


def agree(runtime: Runtime, what: str, key: object = None, error: Exception | None = None) -> None:
    """Make sure that every rank is here, that none has failed, and that all have the same `key`. Collective.

    Args:
        runtime: whose ranks.
        what: the operation, for messages.
        key: anything whose repr must be equal on all ranks that have not failed.
        error: why this rank cannot go on.

    Raises:
        Exception: `error` itself where there is one; elsewhere an error of the same class (:class:`ShardError` for
            classes that are not the engine's) that quotes it.
        DivergenceError: another rank does something else, or the same with another `key`.
    """
    c, agreement = runtime.collectives, runtime.agreement
    if c.world == 1 or agreement is None:
        if error is not None:
            raise error
        return
    # The failure first, by itself: a rank that failed may not know its key.
    agreement.note(zlib.crc32(what.encode()), what)
    answer = agreement.check(what, torch.tensor([error is not None], dtype=torch.uint8, device="cpu"))
    assert answer is not None
    if answer[0]:
        told = None if error is None else (type(error), str(error))
        said = c.watch.exchange(what, told, listen=error is None)
        if error is not None:
            raise error
        rank, (kind, text) = next((r, s) for r, s in enumerate(said) if s is not None)
        raise (kind if issubclass(kind, ShardError) else ShardError)(f"{what} failed on rank {rank}: {text}")
    if key is not None:
        agreement.note(zlib.crc32(repr(key).encode()), f"{what} with {_shortened(repr(key))}")
        agreement.check(what)


def anywhere(runtime: Runtime, what: str, value: bool) -> bool:
    """Whether `value` is true on any rank. Collective.

    Raises:
        DivergenceError: another rank does something else.
    """
    agreement = runtime.agreement
    if runtime.collectives.world == 1 or agreement is None:
        return value
    agreement.note(zlib.crc32(what.encode()), what)
    answer = agreement.check(what, torch.tensor([value], dtype=torch.uint8, device="cpu"))
    assert answer is not None
    return bool(answer[0])


def _shortened(text: str) -> str:
    return text if len(text) <= 200 else text[:200] + "..."


# -- slices to whole --------------------------------------------------------------------------------------------------


def whole_flat(flat: FlatBuffer, what: str, memory: torch.Tensor | None = None) -> torch.Tensor:
    """The values of a flat buffer, in new memory (with one rank to a shard, the shard itself). Collective.

    `memory` is used instead of new one where it is given: uint8, on the engine's device, and nobody reads it any more.
    """
    if not flat.sharded:
        return flat.shard.to(flat.collectives.device)
    return _gathered(flat, flat.shard.dtype, what, lambda own: own.copy_(flat.shard), memory)


def whole_slices(
    flat: FlatBuffer, slices: Sequence[torch.Tensor | None], what: str, memory: torch.Tensor | None = None
) -> list[torch.Tensor | None]:
    """Whole tensors from slices cut like the parameters of `flat`: gradients, one kind of optimizer state. Collective.

    Args:
        flat: gives shapes, strides and cut.
        slices: for each parameter this rank's slice (1-D, any dtype), or None on all ranks.
        what: for messages.
        memory: as for :func:`whole_flat`, for slices of one dtype.

    Returns:
        Plain tensors of the parameters' shapes and strides in new memory, None for None.
    """
    dtypes = {s.dtype for s in slices if s is not None}
    assert memory is None or len(dtypes) <= 1
    result: list[torch.Tensor | None] = [None] * len(slices)
    for dtype in sorted(dtypes, key=str):
        chosen = [i for i, s in enumerate(slices) if s is not None and s.dtype == dtype]

        def fill(own: torch.Tensor, chosen: list[int] = chosen) -> None:
            own.zero_()
            for i in chosen:
                start, stop = flat.layout.local_range(i, flat.collectives.rank)
                own[start:stop].copy_(slices[i])  # type: ignore[arg-type]

        full = _gathered(flat, dtype, what, fill, memory)
        for i in chosen:
            result[i] = flat.view(full, i)
    return result


def _gathered(
    flat: FlatBuffer,
    dtype: torch.dtype,
    what: str,
    fill: Callable[[torch.Tensor], Any],
    memory: torch.Tensor | None = None,
) -> torch.Tensor:
    c = flat.collectives
    moves = flat.sharded and flat.layout.numel > 0
    with torch.inference_mode(False), torch.no_grad():
        with c.gathering() if moves else contextlib.nullcontext():
            if memory is None:
                full = torch.empty(flat.layout.numel, dtype=dtype, device=c.device)
            else:
                full = memory[: flat.layout.numel * dtype.itemsize].view(dtype)
            own = flat.own_slot(full)
            fill(own)
            pending = c.all_gather(full, c.payload(own), what) if moves else None
        if pending is not None:
            pending.wait()
    return full


@contextlib.contextmanager
def gathered_values(runtime: Runtime, unit: Unit) -> Iterator[list[torch.Tensor]]:
    """Inside, the whole current values of each flat of `unit`, as they are stored. Collective, for reading only."""
    if not unit.exact:  # what modules compute with is less precise
        yield [whole_flat(flat, f"the all-gather of unit {unit.name!r}") for flat in unit.flats]
        return
    if not unit.gathers or unit.is_summoned and unit.state is State.FULL:
        yield [flat.full for flat in unit.flats]
        return
    keep = refill(runtime, unit)
    unit.wait()
    try:
        yield [flat.full for flat in unit.flats]
    finally:
        if not keep:
            unit.release()


def refill(runtime: Runtime, unit: Unit) -> bool:
    """Start a gather of the current values, prefetched or not; returns whether a running backward needs them after."""
    keep = bool(unit.uses or unit.kept) and unit.state is not State.SHARDED
    if unit.state is not State.SHARDED:
        # It may have been gathered before an edit of the shards, or be on its way: ranks need not agree on that.
        unit.wait()
        unit.release()
    unit.gather()
    if not keep:
        runtime.schedule.gathered.pop(unit.index, None)
    return keep


# -- whole to slices --------------------------------------------------------------------------------------------------


def send_slices(flat: FlatBuffer, full: torch.Tensor | None, into: torch.Tensor, source: int, what: str) -> None:
    """Cut `full` (on rank `source` only, any device) and give each rank its part in `into`. Collective."""
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
        whole = _bytes(full.to(c.device)) if me and full is not None else None
        if c.size == 1:
            if whole is not None:
                raw.copy_(whole)
            blocking(c.watch, "reduce", what, dist.broadcast, raw, src=c.watch.ranks[source])
        else:
            slots = None if whole is None else whole.view(c.size, -1)
            parts = None if slots is None else [slots[position] for position in c.topology.positions()]
            blocking(c.watch, "reduce", what, dist.scatter, raw, parts, src=c.watch.ranks[source])
        if raw.data_ptr() != into.data_ptr():
            into.copy_(raw.view(into.dtype))
        if me:
            c.bytes_sent += raw.numel() * (c.world - 1)


def send_bytes(runtime: Runtime, values: torch.Tensor, source: int, what: str) -> torch.Tensor:
    """Broadcast a small uint8 CPU tensor from rank `source`; returns it. Collective."""
    c = runtime.collectives
    if c.world == 1:
        return values
    blocking(c.watch, "control", what, dist.broadcast, values, src=c.watch.ranks[source])
    return values


def unify_replicas(flat: FlatBuffer, what: str, own: torch.Tensor | None = None) -> None:
    """Where there are several copies, the first one's values count, since random edits may differ between ranks. Collective.
    `own`: this rank's slice, or something of its size; the shard by default."""
    c = flat.collectives
    held = flat.shard if own is None else own
    own = held.to(c.device)
    # What tensor parallelism does not cut is the same in all planes.
    channel = c.lane_channel if c.lane_channel is not None and not flat.split else c.across_channel
    if not flat.sharded:
        broadcast_coalesced(c, [own], what, within_plane=flat.split)
    elif channel is not None:
        c.send_waiting()
        c.watch.meet(what)
        if own.numel():
            first = c.watch.ranks[min(channel.members)]
            raw, ordered = _bytes(own), c.watch.polls
            blocking(c.watch, channel.name, what, dist.broadcast, raw, src=first, ordered=ordered)
    if own is not held:
        held.copy_(own)


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.uint8)  # every dtype a model may hold can travel as bytes


def grad_of(param: torch.Tensor) -> ShardTensor | None:
    """The sharded gradient of a sharded parameter, read past every interception."""
    with torch._C.DisableTorchFunctionSubclass():
        return own_grad(param)  # type: ignore[return-value]


def reduced_grad_of(param: torch.Tensor) -> Any:
    """The gradient of a parameter, plain for a plain one; refused while no_sync() defers its reduction."""
    grad = grad_of(param)
    if getattr(grad, "_unreduced", False):
        spec = param._spec  # type: ignore[attr-defined]
        raise ShardError(
            f"rank {spec.world_rank}: the gradient of {spec.name} is still this rank's own, because the last backward ran "
            "under engine.no_sync(). Clip, gather or close after the backward that reduces."
        )
    return grad


def local_grads(flat: FlatBuffer) -> list[torch.Tensor | None]:
    """This rank's slices of the reduced gradients."""
    return [None if g is None else g._local for g in map(reduced_grad_of, flat.params)]


def set_grad(param: ShardTensor, local: torch.Tensor | None) -> None:
    """Make `local` (a slice, kept) the gradient; an existing gradient of that dtype keeps its memory."""
    with torch._C.DisableTorchFunctionSubclass(), torch.no_grad():
        existing: Any = own_grad(param)
        if local is None:
            set_own_grad(param, None)
        elif existing is not None and existing._local.dtype == local.dtype:
            existing._local.copy_(local)
        else:
            set_own_grad(param, ShardTensor(local, param._spec))
