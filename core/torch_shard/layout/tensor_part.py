"""Which part of a tensor one rank of a tensor-parallel group computes with. Integers only."""

from __future__ import annotations

from dataclasses import dataclass

from .flat_layout import Box, contiguous_stride

__all__ = ["TensorPart", "dense_stride", "part_of_rank"]


@dataclass(frozen=True)
class TensorPart:
    """A box of a tensor, as large as the tensor in all dimensions but one.

    Attributes:
        shape, stride: of the whole tensor.
        offsets, sizes: of the box.
        dim: the dimension that is cut.
        ranks: global ranks that have the parts, in their order. Where `dim` or `ranks` are different, some ranks may still have
            the same box.
    """

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    dim: int
    ranks: tuple[int, ...]

    @property
    def own_stride(self) -> tuple[int, ...]:
        """Of the box in memory of its own: dense, dimensions in the order in which the whole has them."""
        return dense_stride(self.sizes, self.stride)

    def moved(self, box: Box) -> Box:
        """A box within this one, in the whole tensor's coordinates."""
        offsets = tuple(own + more for own, more in zip(box.offsets, self.offsets, strict=True))
        return Box(offsets, box.sizes)


def part_of_rank(
    shape: tuple[int, ...], stride: tuple[int, ...], dim: int, place: int, ranks: tuple[int, ...]
) -> TensorPart:
    """The part of ``ranks[place]``: as ``torch.chunk`` cuts dimension `dim`, which is what DTensor's ``Shard(dim)`` means. The
    last parts may be smaller, or empty."""
    step = -(-shape[dim] // len(ranks))
    start = min(place * step, shape[dim])
    stop = min(start + step, shape[dim])
    offsets, sizes = [0] * len(shape), list(shape)
    offsets[dim], sizes[dim] = start, stop - start
    return TensorPart(shape, stride, tuple(offsets), tuple(sizes), dim, ranks)


def dense_stride(sizes: tuple[int, ...], like: tuple[int, ...]) -> tuple[int, ...]:
    """Strides without gaps, largest where those of `like` are largest."""
    order = sorted(range(len(sizes)), key=lambda dim: (-like[dim], dim))
    steps = contiguous_stride([sizes[dim] for dim in order])
    found = dict(zip(order, steps, strict=True))
    return tuple(found[dim] for dim in range(len(sizes)))
