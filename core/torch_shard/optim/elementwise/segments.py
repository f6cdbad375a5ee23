"""How the parameters of a group are divided for a step: segments of one shard, and the runs that they are stepped in; and by
their optimizer state, which of them may be stepped together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ...errors import NeedsGatherError
from ...shard_tensor.spec import same_cut
from ...shard_tensor.tensor import ShardTensor
from .piece import Piece

__all__ = ["Run", "Segment", "fit_fused", "runs_of", "signature"]

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
    """Make runs: each large segment is one, the small ones of a kind are one together."""
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
    """Return True if a fused kernel takes the pieces' state: torch's for-loop takes a mixture of state that is there and state
    that is not (SGD's momentum), counters that are Python numbers, and other dtypes than the parameter's; the fused kernels
    raise."""
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


def signature(param: ShardTensor, entries: Any) -> Any:
    """Return what parameters of one run must agree in; raises where a flat step can't take the state."""
    if not entries:
        return None
    found: list[tuple[Any, ...]] = []
    for key, value in entries.items():
        if isinstance(value, ShardTensor):
            if not same_cut(value._spec, param._spec):
                raise _unusable(param, key, "is a sharded tensor that is cut differently")
            found.append((key, "elements", value.dtype))
        elif isinstance(value, torch.Tensor):
            if value.dim():
                raise _unusable(
                    param, key, f"has shape {tuple(value.shape)} where the parameter has {tuple(param.shape)}"
                )
            found.append((key, value.dtype, value.device, value.item()))
        elif value is None or isinstance(value, (bool, int, float, complex, str)):
            found.append((key, type(value), value))
        else:
            raise _unusable(param, key, f"is a {type(value).__name__}")
    return tuple(found)


def _unusable(param: ShardTensor, key: str, what: str) -> NeedsGatherError:
    return NeedsGatherError(
        f"rank {param._spec.world_rank}: optimizer state {key!r} of {param._spec.name} {what}, which a step on slices can't use; "
        "nothing was changed. Drop it (`optimizer.state.pop(parameter)`), load state that fits, or change the parameter inside "
        "`with engine.gathered(parameter, write=True)`."
    )
