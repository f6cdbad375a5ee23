"""Reads of flat buffers by this rank alone: the other ranks hand out their shards (:mod:`torch_shard.comm.one_sided`)."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Literal

import torch

from ..comm.one_sided.partners import ShardPart

if TYPE_CHECKING:
    from ..comm.one_sided.partners import Reading
    from .flat_buffer import FlatBuffer


def fill(flat: FlatBuffer, full: torch.Tensor, reading: Reading, form: Literal["stored", "sent"]) -> None:
    """Fill `full`, 1-D with one slot a rank, with the ranks' shards in this form."""
    slots = full.view(flat.collectives.size, -1)
    part = _part(flat, form)
    slots[flat.collectives.rank].copy_(flat.served.part(part))
    reading.fill(slots.unbind(0), len(slots) * [part])


def put_own_values(flat: FlatBuffer, full: torch.Tensor, reading: Reading) -> None:
    """Overwrite, in `full`, parameters of which this rank alone has other values."""
    for i, slot in enumerate(flat.layout.slots if reading.own else ()):
        if slot.name in reading.own:
            flat.view(full, i).copy_(reading.own[slot.name].to(flat.dtype))


def read_parameter(flat: FlatBuffer, index: int, reading: Reading | None) -> torch.Tensor:
    """Return parameter `index` with its stored values: plain, in new memory.

    Under tensor parallelism this is the rank's part of the parameter. Without other ranks `reading` may be None.
    """
    values = _read_pieces(flat, index, flat.dtype, reading, partial(_part, flat, "stored"), flat.served.part)
    name = flat.layout.slots[index].name
    if reading is not None and name in reading.own:
        with torch.no_grad():
            values.copy_(reading.own[name])
    return values


def read_state(flat: FlatBuffer, part: ShardPart, local: torch.Tensor, reading: Reading | None) -> torch.Tensor:
    """Return full optimizer state that is cut like a parameter of a buffer: plain, in new memory.

    Args:
        flat: the buffer.
        part: the state.
        local: this rank's shard of the state.
        reading: the running read; may be None without other ranks.
    """
    return _read_pieces(flat, part.param, local.dtype, reading, lambda start, stop: part, lambda part: local)


def _read_pieces(
    flat: FlatBuffer,
    index: int,
    dtype: torch.dtype,
    reading: Reading | None,
    part_of: Callable[[int, int], ShardPart],
    own_piece: Callable[[ShardPart], torch.Tensor],
) -> torch.Tensor:
    """Return a tensor of the shape of parameter `index`, of which each rank has the piece that is in its slot.

    Args:
        flat: the buffer.
        index: the parameter's number in the buffer.
        dtype: the dtype of the result.
        reading: the running read; None without other ranks.
        part_of: returns the request to a rank, by the piece's beginning and end in that rank's slot.
        own_piece: returns this rank's piece, by the request for it.
    """
    layout, slot = flat.layout, flat.layout.slots[index]
    with torch.inference_mode(False), torch.no_grad():
        values = torch.empty(slot.numel, dtype=dtype, device=flat.collectives.device)
        pieces, parts = [], []
        for rank in range(flat.collectives.size):
            first, last = layout.owned(index, rank)
            pieces.append(values[first:last])
            parts.append(part_of(*layout.local_range(index, rank)))
        own = flat.collectives.rank
        if pieces[own].numel():
            pieces[own].copy_(own_piece(parts[own]))
        if reading is not None:
            reading.fill(pieces, parts)
    return values.as_strided(slot.shape, slot.stride)


def _part(
    flat: FlatBuffer, form: Literal["stored", "sent"], start: int | None = None, stop: int | None = None
) -> ShardPart:
    unit = flat.unit()
    assert unit is not None
    return ShardPart(unit.index, unit.flats.index(flat), form, start, stop)
