"""Unsharded values of one flat buffer, gathered into memory of their own."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

from . import shard_reads
from .flat_buffer import FlatBuffer


def full_flat(flat: FlatBuffer, what: str, memory: torch.Tensor | None = None) -> torch.Tensor:
    """Return the unsharded values of a flat buffer; where one rank has them all, the shard itself. Collective.

    Inside a read by this rank alone the other ranks hand out their shards.

    Args:
        flat: the buffer.
        what: the operation, for messages.
        memory: uint8, on the engine's device; holds the result. None for new memory.
    """
    if not flat.sharded:
        return flat.shard.to(flat.collectives.device)
    unit = flat.unit()
    reading = None if unit is None else unit.runtime.reading
    if reading is not None:
        with torch.inference_mode(False), torch.no_grad():
            full = _memory(flat, flat.dtype, memory)
            shard_reads.fill(flat, full, reading, "stored")
            shard_reads.put_own_values(flat, full, reading)
        return full
    return _gathered(flat, flat.shard.dtype, what, lambda own: own.copy_(flat.shard), memory)


def full_tensors_from(
    flat: FlatBuffer, shards: Sequence[torch.Tensor | None], what: str, memory: torch.Tensor | None = None
) -> list[torch.Tensor | None]:
    """Return full tensors from shards that are cut like the parameters of `flat`, such as gradients. Collective.

    Args:
        flat: the buffer whose layout applies.
        shards: this rank's shard of each parameter (1-D, any dtype), or None on all ranks.
        what: the operation, for messages.
        memory: memory that :func:`full_flat` takes; then all shards must have one dtype.

    Returns:
        For each parameter a plain tensor of its shape and strides in new memory; None where the shard is None.
    """
    dtypes = {s.dtype for s in shards if s is not None}
    assert memory is None or len(dtypes) <= 1
    result: list[torch.Tensor | None] = [None] * len(shards)
    for dtype in sorted(dtypes, key=str):
        chosen = [i for i, s in enumerate(shards) if s is not None and s.dtype == dtype]

        def fill(own: torch.Tensor, chosen: list[int] = chosen) -> None:
            own.zero_()
            for i in chosen:
                start, stop = flat.layout.local_range(i, flat.collectives.rank)
                own[start:stop].copy_(shards[i])  # type: ignore[arg-type]

        full = _gathered(flat, dtype, what, fill, memory)
        for i in chosen:
            result[i] = flat.view(full, i)
    return result


def _gathered(
    flat: FlatBuffer,
    dtype: torch.dtype,
    what: str,
    fill: Callable[[torch.Tensor], Any],
    memory: torch.Tensor | None,
) -> torch.Tensor:
    c = flat.collectives
    moves = flat.sharded and flat.layout.numel > 0
    with torch.inference_mode(False), torch.no_grad():
        with c.gathering() if moves else contextlib.nullcontext():
            full = _memory(flat, dtype, memory)
            own = flat.own_slot(full)
            fill(own)
            pending = c.all_gather(full, c.payload(own), what) if moves else None
        if pending is not None:
            pending.wait()
    return full


def _memory(flat: FlatBuffer, dtype: torch.dtype, memory: torch.Tensor | None) -> torch.Tensor:
    if memory is None:
        return torch.empty(flat.layout.numel, dtype=dtype, device=flat.collectives.device)
    return memory[: flat.layout.numel * dtype.itemsize].view(dtype)
