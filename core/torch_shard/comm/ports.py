"""The protocol through which this room sees a sharded model, whose class lies in a higher room."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from .collectives import Collectives
    from .divergence import OperationSequence

__all__ = ["ModelPort"]


class ModelPort(Protocol):
    """A sharded model on one rank: its collectives, and the sequence of operations that its ranks compare."""

    @property
    def collectives(self) -> Collectives:
        """The collectives over the model's ranks."""

    @property
    def operations(self) -> OperationSequence:
        """The sequence of operations that the ranks compare."""
