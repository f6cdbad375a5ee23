"""The part of a tensor with which one rank of a tensor-parallel group computes. This module has integers only."""

from __future__ import annotations

from typing import NamedTuple

from .flat_layout import Box, contiguous_stride


class TensorPart(NamedTuple):
    """A box of a tensor that is as large as the tensor in all dimensions but one.

    Attributes:
        shape, stride: the shape and the strides of the full tensor.
        offsets, sizes: the offsets and the sizes of the box.
        dim: the dimension that is sharded.
        ranks: the global ranks that have the parts, in the order of the parts. Two parts with different `dim` or `ranks` may
            still be the same box.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dim: int
    ranks: tuple[int, ...]

    def moved(self, box: Box) -> Box:
        """Return `box`, given in the coordinates of this part, in the coordinates of the full tensor."""
        offsets = tuple(own + more for own, more in zip(box.offsets, self.offsets, strict=True))
        return Box(offsets, box.sizes)


def part_of_rank(
    shape: tuple[int, ...], stride: tuple[int, ...], dim: int, place: int, ranks: tuple[int, ...]
) -> TensorPart:
    """Return the part of ``ranks[place]``.

    Dimension `dim` is divided as ``torch.chunk`` divides it, which is the meaning of DTensor's ``Shard(dim)``. The last parts
    may be smaller, or empty.
    """
    step = -(-shape[dim] // len(ranks))
    start = min(place * step, shape[dim])
    stop = min(start + step, shape[dim])
    offsets, sizes = [0] * len(shape), list(shape)
    offsets[dim], sizes[dim] = start, stop - start
    return TensorPart(shape, stride, tuple(offsets), tuple(sizes), dim, ranks)


def dense_stride(sizes: tuple[int, ...], like: tuple[int, ...]) -> tuple[int, ...]:
    """Return strides without gaps for `sizes`, with the dimensions ordered by the strides `like`."""
    order = sorted(range(len(sizes)), key=lambda dim: (-like[dim], dim))
    steps = contiguous_stride([sizes[dim] for dim in order])
    found = dict(zip(order, steps, strict=True))
    return tuple(found[dim] for dim in range(len(sizes)))
