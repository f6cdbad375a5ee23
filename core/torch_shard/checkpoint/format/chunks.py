"""The chunks of a tensor in a sharded checkpoint."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata


def covers(size: Sequence[int], chunks: Sequence[ChunkStorageMetadata]) -> bool:
    """Return True if each element of a tensor of this shape lies in exactly one chunk."""
    boxes = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in chunks]
    if any(len(offsets) != len(size) for offsets, _ in boxes):
        return False
    if any(o < 0 or o + s > n for offsets, sizes in boxes for o, s, n in zip(offsets, sizes, size, strict=True)):
        return False
    boxes = [(offsets, sizes) for offsets, sizes in boxes if all(sizes)]
    if sum(torch.Size(sizes).numel() for _, sizes in boxes) != torch.Size(size).numel():
        return False
    if not size:
        return len(boxes) == 1
    # By the first dimension, boxes that begin after the end of one can't overlap it.
    boxes.sort()
    for i, (offsets, sizes) in enumerate(boxes):
        for others, theirs in itertools.islice(boxes, i + 1, None):
            if others[0] >= offsets[0] + sizes[0]:
                break
            if all(a < o + t and o < a + s for a, s, o, t in zip(offsets, sizes, others, theirs, strict=True)):
                return False
    return True
