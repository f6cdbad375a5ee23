"""How the parameters of a group are divided for a step: segments of one shard, and the runs that they are stepped in."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from .piece import Piece

__all__ = ["Run", "Segment", "fit_fused", "runs_of"]

SMALL = 1 << 14
"""Segments of fewer elements are worked on together..."""
TOGETHER = 1 << 20
"""...up to this many elements in all, so that copies of values and gradients stay small."""


class Segment:
    def __init__(self, shard: int, start: int, stop: int, grad: torch.Tensor | None) -> None:
        self.shard, self.start, self.stop = shard, start, stop
        self.grad = grad  # None: where the shard's reduced slice has it
        self.offset = 0  # in the run
        self.members: list[int] = []


class Run:
    """Parameters that take the same step. `members` are their numbers; some may have no elements on this rank."""

    def __init__(self, segments: list[Segment], kind: Any) -> None:
        self.segments, self.kind = segments, kind
        self.members = [i for segment in segments for i in segment.members]
        self.length = 0
        self.places: dict[int, int] = {}  # of a member: where its segment begins in the run, less where in the shard
        for segment in segments:
            segment.offset = self.length
            self.places.update((i, self.length - segment.start) for i in segment.members)
            self.length += segment.stop - segment.start
        self.pieces: list[Piece] = []


def runs_of(segments: list[Segment], kinds: dict[int, Any]) -> list[Run]:
    """Each large segment is a run; the small ones of a kind are one together."""
    runs: list[Run] = []
    small: dict[Any, list[Segment]] = {}
    count = 0
    for segment in segments:
        kind, length = kinds[segment.members[0]], segment.stop - segment.start
        if segment.grad is None and length < SMALL and count + length <= TOGETHER:
            small.setdefault(kind, []).append(segment)
            count += length
        else:
            runs.append(Run([segment], kind))
    return runs + [Run(found, kind) for kind, found in small.items()]


def fit_fused(pieces: Sequence[Piece]) -> bool:
    """torch's for-loop takes a mixture of state that is there and state that is not (SGD's momentum), counters that are Python
    numbers, and other dtypes than the parameter's; the fused kernels raise."""
    kinds: set[frozenset[str]] = set()
    for piece in pieces:
        kinds.add(frozenset(key for key, value in piece.state.items() if value is not None))
        for value in piece.state.values():
            if value is None:
                continue
            if not isinstance(value, torch.Tensor):
                return False
            if value.dtype != (piece.param.dtype if value.dim() else torch.float32):
                return False
    return len(kinds) < 2
