"""The division of a group's parameters for a step: into segments of one shard, and into runs, by their optimizer state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ...errors import NeedsGatherError
from ...shard_tensor.spec import same_cut
from ...shard_tensor.tensor import ShardTensor
from .piece import Piece

_SMALL = 1 << 14
"""The number of elements below which segments are stepped together."""
_TOGETHER = 1 << 20
"""The most elements of segments that are stepped together, so that copies of values and gradients stay small."""


@dataclass
class Segment:
    """Neighbours in one shard.

    Attributes:
        flat_number: the number of the flat buffer.
        start, stop: the first element in the shard, and the one after the last.
        grad: the gradient; None if it is a part of the shard's reduced gradient.
        members: the numbers of the parameters.
    """

    flat_number: int
    start: int
    stop: int
    grad: torch.Tensor | None
    members: list[int] = field(default_factory=list)


class Run:
    """Parameters that take the same step.

    Attributes:
        segments: see :class:`Segment`.
        kind: equal for parameters that may be stepped together.
        members: the numbers of the parameters; some may have no elements on this rank.
        length: the number of elements.
        places: the position of each member's segment in the run, less its position in the shard.
        pieces: the optimizer's parameters for this run.
    """

    def __init__(self, segments: list[Segment], kind: Any) -> None:
        self.segments, self.kind = segments, kind
        self.members = [i for segment in segments for i in segment.members]
        self.length = 0
        self.places: dict[int, int] = {}
        for segment in segments:
            self.places.update((i, self.length - segment.start) for i in segment.members)
            self.length += segment.stop - segment.start
        self.pieces: list[Piece] = []


def runs_of(segments: list[Segment], kinds: dict[int, Any]) -> list[Run]:
    """Return one run for each large segment, and one for all small segments of a kind."""
    runs: list[Run] = []
    small: dict[Any, list[Segment]] = {}
    count = 0
    for segment in segments:
        kind, length = kinds[segment.members[0]], segment.stop - segment.start
        if segment.grad is None and length < _SMALL and count + length <= _TOGETHER:
            small.setdefault(kind, []).append(segment)
            count += length
        else:
            runs.append(Run([segment], kind))
    return runs + [Run(found, kind) for kind, found in small.items()]


def fit_fused(pieces: Sequence[Piece]) -> bool:
    """Return True if a fused kernel takes the pieces' state.

    torch's for-loop also takes a mixture of state that is there and state that is not (SGD's momentum), counters that are
    Python numbers, and other dtypes than the parameter's. The fused kernels raise.
    """
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
    """Return what the state of all parameters of a run must agree in.

    Raises:
        NeedsGatherError: a flat step can't use the state.
    """
    if not entries:
        return None
    found: list[tuple[Any, ...]] = []
    for key, value in entries.items():
        if isinstance(value, ShardTensor) and same_cut(value._spec, param._spec):
            found.append((key, "elements", value.dtype))
        elif isinstance(value, torch.Tensor) and not isinstance(value, ShardTensor) and not value.dim():
            found.append((key, value.dtype, value.device, value.item()))
        elif value is None or isinstance(value, (bool, int, float, complex, str)):
            found.append((key, type(value), value))
        else:
            what = (
                f"of shape {tuple(value.shape)}" if isinstance(value, torch.Tensor) else "in the state of a parameter"
            )
            raise NeedsGatherError(
                f"rank {param._spec.world_rank}: optimizer state {key!r} of {param._spec.name} is a {type(value).__name__} "
                f"{what}, which is not sharded like the parameter, so that a step on shards can't use it; nothing was changed. "
                "Drop it (`optimizer.state.pop(parameter)`), load state that fits, or change the parameter inside `with "
                f"{param._spec.comm.watchdog.handle}.gathered(parameter, write=True)`."
            )
    return tuple(found)
