"""The protocols through which this room sees a sharded model, whose class lies in a higher room."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import torch

if TYPE_CHECKING:
    from .collectives import Collectives
    from .divergence import OperationSequence
    from .one_sided.partners import ShardPart
    from .one_sided.versions import Versions


class ModelPort(Protocol):
    """A sharded model on one rank: its collectives, and the sequence of operations that its ranks compare."""

    @property
    def collectives(self) -> Collectives:
        """The collectives over the model's ranks."""

    @property
    def operations(self) -> OperationSequence:
        """The sequence of operations that the ranks compare."""

    def meet(
        self,
        what: str,
        notes: Sequence[tuple[int, str]],
        payload: torch.Tensor | None = None,
        sure: bool = False,
        alone: bool = True,
    ) -> torch.Tensor | None:
        """Compare the ranks' sequences before an operation that only reads; return None if this rank reads alone. Collective."""


class ShardSource(Protocol):
    """The shards of one model, which partners read from a thread of their own."""

    @property
    def versions(self) -> Versions:
        """The version of the shards."""

    def met(self) -> None:
        """Note that all ranks have come to a collective, so that nobody reads any more what this rank has dropped before it."""

    def shard_to_send(self, part: ShardPart, before: bool) -> torch.Tensor:
        """Return this rank's shard of a flat buffer or of optimizer state, or a part of it: contiguous, on the CPU.

        With `before`, return it as it was before the edits that may be taken back.
        """
