"""Views of a gradient buffer, one for each parameter.

The views are kept on the buffer's tensor, because units of one shape take the same memory in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch

from ..layout.flat_layout import Slot, slot_view

__all__ = ["Cut", "FlatViews", "cut_of"]

Cut: TypeAlias = tuple[tuple[tuple[int, ...], tuple[int, ...], int], ...]
"""Shape, strides and offset of each parameter of a layout, without the parameters' names."""


def cut_of(slots: Sequence[Slot]) -> Cut:
    """Return the cut of the layout with these slots, under which its views are kept."""
    return tuple((slot.shape, slot.stride, slot.offset) for slot in slots)


class FlatViews:
    """Views of one buffer, each made when it is first asked for. They are valid as long as the buffer keeps its memory."""

    __slots__ = ("_slots", "_views")

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots = slots
        self._views: list[torch.Tensor | None] = [None] * len(slots)

    @staticmethod
    def of(flat: torch.Tensor, slots: Sequence[Slot], cut: Cut) -> FlatViews:
        """Return the views that `flat`, 1-D, keeps for a layout with these slots; `cut` is their :func:`cut_of`."""
        kept: dict[Cut, FlatViews] | None = getattr(flat, "_cuts", None)
        if kept is None:
            kept = flat._cuts = {}  # type: ignore[attr-defined]
        found = kept.get(cut)
        if found is None:
            found = kept[cut] = FlatViews(slots)
        return found

    def view(self, flat: torch.Tensor, index: int) -> torch.Tensor:
        """Return the view of parameter `index` in `flat`, which must be the buffer that these views are kept on."""
        found = self._views[index]
        if found is None:
            # `.data` breaks the reference cycle: a plain view would refer to the buffer, which refers to the view.
            found = self._views[index] = slot_view(flat, self._slots[index]).data
        return found
