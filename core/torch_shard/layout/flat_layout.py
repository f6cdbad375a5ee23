"""Where each parameter of a unit lies in the unit's flat buffer, and how ranks cut that buffer.

This module has integers only, and nothing in it is collective. Positions and lengths are in elements, and ranges are half-open.

A flat buffer of two parameters on two ranks, with ``.`` for padding::

    flat buffer   |  weight (6 x 4)          |..|  bias (6)  |....|
    rank range    |  rank 0: shard_numel      |  rank 1: shard_numel |
                                              ^ the cut may fall inside a parameter

*Memory order* is the order in which a parameter's own strides lay out its elements; it is what the
flat buffer holds, so a channels_last weight stays channels_last. For a contiguous parameter it is
the usual row-major order.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from ..errors import LayoutError

ALIGNMENT = 16
"""Bytes to which parameter starts and shard sizes are aligned (vectorised kernels need 16)."""


class ParamMeta(NamedTuple):
    """The properties of a parameter that a layout follows from.

    Attributes:
        name: the full name, for error messages.
        shape: the global shape.
        stride: the strides in elements: dense and without overlap, in any order of dimensions.
    """

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]


class Slot(NamedTuple):
    """One parameter's place in the flat buffer.

    Attributes:
        name, shape, stride: the properties of the parameter, as in :class:`ParamMeta`.
        offset: the first element in the flat buffer, aligned to 16 bytes.
        numel: the number of elements, without padding.
        order: the dimensions from the largest stride to the smallest; memory order is the row-major
            order of the shape permuted by it.
    """

    name: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    numel: int
    order: tuple[int, ...]

    @property
    def stop(self) -> int:
        """The position behind the parameter's last element in the flat buffer."""
        return self.offset + self.numel


class Box(NamedTuple):
    """A rectangular part of a parameter: ``tensor[o0:o0+s0, o1:o1+s1, ...]``."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """The number of elements in the box."""
        return math.prod(self.sizes)


@dataclass(frozen=True)
class FlatLayout:
    """The layout of one flat buffer (one unit, one dtype) over `world_size` ranks.

    Attributes:
        slots: the parameters, in the order in which they lie in the buffer.
        itemsize: the bytes of an element.
        world_size: the number of ranks that share the buffer.
        numel: the number of elements in the full buffer, padding included.
        shard_numel: the number of elements that each rank holds; ``numel == shard_numel * world_size``.
        aligned: True if each slot begins at a multiple of 16 bytes; False for a :meth:`view`.

    Raises:
        LayoutError: the numbers contradict each other.
    """

    slots: tuple[Slot, ...]
    itemsize: int
    world_size: int
    numel: int
    shard_numel: int
    aligned: bool = True

    def __post_init__(self) -> None:
        align = _alignment(self.itemsize)
        if self.numel != self.shard_numel * self.world_size or self.shard_numel % align:
            raise LayoutError(
                f"{self.numel} elements do not cut into {self.world_size} aligned shards of {self.shard_numel}."
            )
        end = 0
        for slot in self.slots:
            if (self.aligned and slot.offset % align) or slot.offset < end:
                raise LayoutError(f"{slot.name}: offset {slot.offset} is unaligned or taken.")
            end = slot.stop
        if end > self.numel:
            raise LayoutError(f"{self.numel} elements are too few for parameters ending at {end}.")

    @classmethod
    def build(cls, metas: Iterable[ParamMeta], itemsize: int, world_size: int) -> FlatLayout:
        """Return a layout with the parameters end to end, padded so that every rank holds the same number of elements.

        Args:
            metas: the parameters in order; there may be none, and 0-d and zero-element parameters.
            itemsize: the bytes of an element.
            world_size: the number of ranks.

        Raises:
            LayoutError: a parameter's strides overlap or leave gaps.
        """
        if world_size < 1 or itemsize < 1:
            raise LayoutError(
                f"a layout needs at least one rank and one byte per element, not {world_size} and {itemsize}."
            )
        align = _alignment(itemsize)
        slots = []
        end = 0
        for meta in metas:
            offset, numel = _round_up(end, align), math.prod(meta.shape)
            slots.append(Slot(*meta, offset, numel, _memory_order(meta)))
            end = offset + numel
        shard_numel = _round_up(-(-end // world_size), align)
        return cls(tuple(slots), itemsize, world_size, shard_numel * world_size, shard_numel)

    def view(self, index: int, shape: tuple[int, ...], stride: tuple[int, ...], start: int) -> FlatLayout:
        """Return a layout of the same shards that places one tensor: a view of parameter `index`, without gaps.

        Args:
            index: the index of the parameter.
            shape, stride: the shape and the strides of the view.
            start: the element of the parameter, in memory order, at which the view begins.

        Raises:
            LayoutError: the view's strides overlap or leave gaps.
        """
        slot = self.slots[index]
        order, numel = _memory_order(ParamMeta(slot.name, shape, stride)), math.prod(shape)
        # A view without elements may begin anywhere.
        part = Slot(slot.name, shape, stride, slot.offset + (start if numel else 0), numel, order)
        return replace(self, slots=(part,), aligned=False)

    def rank_range(self, rank: int) -> tuple[int, int]:
        """Return the part of the flat buffer that `rank` holds."""
        if not 0 <= rank < self.world_size:
            raise LayoutError(f"rank {rank} is not one of {self.world_size} ranks.")
        return rank * self.shard_numel, (rank + 1) * self.shard_numel

    def owned(self, index: int, rank: int) -> tuple[int, int]:
        """Return the range of elements of parameter `index`, in memory order, that `rank` holds; ``(0, 0)`` if it is empty."""
        slot = self.slots[index]
        start, stop = self.rank_range(rank)
        first = max(start, slot.offset)
        last = min(stop, slot.stop)
        if last <= first:
            return 0, 0
        return first - slot.offset, last - slot.offset

    def local_range(self, index: int, rank: int) -> tuple[int, int]:
        """Return the range of :meth:`owned` within the rank's own shard; ``(0, 0)`` if it is empty."""
        first, last = self.owned(index, rank)
        if first == last:
            return 0, 0
        shift = self.slots[index].offset - rank * self.shard_numel
        return first + shift, last + shift

    def pieces(self, rank: int) -> tuple[list[int], list[int]]:
        """Return how a rank's shard splits into its parameters' shards.

        Returns:
            The sizes of consecutive pieces, padding included, the last of size 0; and for each parameter the index of the
            piece that is its shard, which is the last piece if the rank holds nothing of the parameter.
        """
        ranges = [self.local_range(i, rank) for i in range(len(self.slots))]
        sizes: list[int] = []
        number: dict[int, int] = {}
        end = 0
        for i, (start, stop) in enumerate(ranges):
            if start == stop:
                continue
            if start > end:
                sizes.append(start - end)
            number[i] = len(sizes)
            sizes.append(stop - start)
            end = stop
        if end < self.shard_numel:
            sizes.append(self.shard_numel - end)
        return [*sizes, 0], [number.get(i, len(sizes)) for i in range(len(ranges))]

    def gaps(self) -> list[tuple[int, int]]:
        """Return the padding: the ranges of the flat buffer that belong to no parameter."""
        found, end = [], 0
        for slot in self.slots:
            if slot.offset > end:
                found.append((end, slot.offset))
            end = slot.stop
        if end < self.numel:
            found.append((end, self.numel))
        return found

    def owners(self, index: int) -> range:
        """Return the ranks that hold a part of parameter `index`; none if it has no elements."""
        slot = self.slots[index]
        if slot.numel == 0:
            return range(0)
        return range(slot.offset // self.shard_numel, (slot.stop - 1) // self.shard_numel + 1)

    def boxes(self, index: int, start: int, stop: int) -> tuple[Box, ...]:
        """Cut elements ``[start, stop)`` (memory order) of a parameter into N-d boxes.

        Returns:
            At most ``2 * ndim - 1`` boxes (one for 0-d) in the parameter's own dimensions. They
            tile the range exactly, and one after the other, each read in memory order, they give
            the range's elements in order.

        Raises:
            LayoutError: the range is not within the parameter.
        """
        slot = self.slots[index]
        if not 0 <= start <= stop <= slot.numel:
            raise LayoutError(f"{slot.name} has no elements [{start}, {stop}) of {slot.numel}.")
        if start == stop:
            return ()
        permuted = tuple(slot.shape[dim] for dim in slot.order)
        found: list[Box] = []
        _cut(permuted, (), start, stop, found)
        return tuple(_unpermute(box, slot.order) for box in found)


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the row-major strides of a shape, in elements, as torch gives them."""
    stride: list[int] = []
    step = 1
    for size in reversed(shape):
        stride.append(step)
        step *= max(size, 1)
    return tuple(reversed(stride))


def aligned(nbytes: int) -> int:
    """Return `nbytes`, rounded up to a multiple of :data:`ALIGNMENT`."""
    return _round_up(nbytes, ALIGNMENT)


def _alignment(itemsize: int) -> int:
    return math.lcm(ALIGNMENT, itemsize) // itemsize


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


def _memory_order(meta: ParamMeta) -> tuple[int, ...]:
    """Return the dimensions by descending stride; raise a LayoutError if the memory has gaps or overlaps."""
    if len(meta.shape) != len(meta.stride) or any(size < 0 for size in meta.shape):
        raise LayoutError(f"{meta.name}: strides {meta.stride} do not fit shape {meta.shape}.")
    dims = range(len(meta.shape))
    # Of dimensions with equal strides at most one is longer than 1 (else they overlap, which is found
    # below), and it varies fastest.
    order = tuple(sorted(dims, key=lambda dim: (-meta.stride[dim], meta.shape[dim] > 1, dim)))
    if math.prod(meta.shape) == 0:
        return order
    expected = 1
    for dim in reversed(order):
        if meta.shape[dim] == 1:
            continue  # its stride is never used, and torch leaves anything there
        if meta.stride[dim] != expected:
            raise LayoutError(
                f"{meta.name}: memory of shape {meta.shape} with strides {meta.stride} has gaps "
                "or overlaps (a view, an expanded or a sliced tensor?). Give it memory of its own "
                "before sharding: nn.Parameter(p.detach().clone())."
            )
        expected *= meta.shape[dim]
    return order


def _cut(shape: tuple[int, ...], prefix: tuple[int, ...], start: int, stop: int, found: list[Box]) -> None:
    """Append the boxes of row-major elements [start, stop) of the sub-tensor at `prefix`."""
    depth = len(prefix)
    ones = (1,) * depth
    if depth == len(shape):
        found.append(Box(prefix, ones))
        return
    rest = shape[depth + 1 :]
    row = math.prod(rest)
    first, head = divmod(start, row)
    last, tail = divmod(stop, row)
    if first == last:  # within one row
        _cut(shape, (*prefix, first), head, tail, found)
        return
    if head:
        _cut(shape, (*prefix, first), head, row, found)
        first += 1
    if first < last:
        offsets = (*prefix, first, *(0 for _ in rest))
        found.append(Box(offsets, (*ones, last - first, *rest)))
    if tail:
        _cut(shape, (*prefix, last), 0, tail, found)


def _unpermute(box: Box, order: tuple[int, ...]) -> Box:
    offsets = [0] * len(order)
    sizes = [0] * len(order)
    for position, dim in enumerate(order):
        offsets[dim] = box.offsets[position]
        sizes[dim] = box.sizes[position]
    return Box(tuple(offsets), tuple(sizes))


def slot_view(flat: torch.Tensor, slot: Slot) -> torch.Tensor:
    """Return a parameter in its own shape and strides, as a view of a 1-D buffer of the full layout."""
    return flat.as_strided(slot.shape, slot.stride, flat.storage_offset() + slot.offset)
