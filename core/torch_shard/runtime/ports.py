"""The interface that the runtime needs of optimizers' steps, which are above it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from ..unit.flat_buffer import FlatBuffer
    from ..unit.unit import Unit
    from .use import Use


class StepInBackward(Protocol):
    """An optimizer that steps each unit during backward, as soon as its gradients are reduced."""

    optimizer: Any

    def begin(self, syncing: bool) -> None:
        """Begin a backward, which reduces gradients if `syncing`."""

    def end(self) -> None:
        """End the backward: step what is left."""

    def enter_call(self) -> None:
        """Note that the user's call of backward begins, in which several backwards may run."""

    def leave_call(self) -> None:
        """Note that the user's call of backward has ended."""

    def expect(self, use: Use) -> None:
        """Note that backward will come back to `use`."""

    def note_reached(self, use: Use) -> None:
        """Note that backward has come to `use`."""

    def note_computed_with(self, unit: Unit) -> None:
        """Note that backward computes with `unit`."""

    def note_unsharded(self, unit: Unit) -> None:
        """Note that `unit` is unsharded."""

    def postpones(self, unit: Unit) -> bool:
        """Return True if `unit` may not be stepped before the end of backward."""

    def votes(self) -> list[int]:
        """Return this rank's bytes for the comparison at the end of backward."""

    def check_votes(self, votes: Sequence[int]) -> None:
        """Raise if the largest votes of the ranks say that backward has computed with stepped values."""

    def step(self, flat: FlatBuffer) -> None:
        """Step the parameters of `flat`, whose gradients are reduced."""

    def take_back(self, optimizer: Any) -> None:
        """Undo what the latest backward has done to the options of `optimizer`, which steps outside backward now."""

    def check_reader(self) -> None:
        """Raise if `.grad` is read that the step in backward has consumed."""

    def refuse(self, what: str) -> None:
        """Raise the error that `what` needs gradients that the step in backward has consumed."""
