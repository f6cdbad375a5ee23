"""What this room needs of a sharded model, which is made above it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from .collectives import Collectives
    from .divergence import Agreement

__all__ = ["Member"]


class Member(Protocol):
    """One rank's side of a sharded model: the process groups that its ranks share, and what they compare."""

    @property
    def collectives(self) -> Collectives:
        """The collectives over the model's ranks."""

    @property
    def agreement(self) -> Agreement | None:
        """The sequence of operations that the ranks compare; None while the model is being set up."""
