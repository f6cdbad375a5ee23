"""Parameters' places in a gradient buffer, kept with the buffer: many units of one shape take the same memory in turn."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch

from ..layout.flat_layout import Slot, slot_view

__all__ = ["Cut", "FlatViews", "cut_of"]

Cut: TypeAlias = tuple[tuple[tuple[int, ...], tuple[int, ...], int], ...]
"""Where a layout puts its parameters, whatever they are called: shape, strides and offset of each."""


def cut_of(slots: Sequence[Slot]) -> Cut:
    return tuple((slot.shape, slot.stride, slot.offset) for slot in slots)


class FlatViews:
    """Views of one buffer, made when they are first asked for. The buffer must keep its memory; the views go with it."""

    __slots__ = ("_slots", "_views")

    def __init__(self, slots: Sequence[Slot]) -> None:
        self._slots = slots
        self._views: list[torch.Tensor | None] = [None] * len(slots)

    @staticmethod
    def of(flat: torch.Tensor, slots: Sequence[Slot], cut: Cut) -> FlatViews:
        """Those of `flat`, 1-D, for a layout with these slots, whose `cut` is :func:`cut_of`."""
        kept: dict[Cut, FlatViews] | None = getattr(flat, "_cuts", None)
        if kept is None:
            kept = flat._cuts = {}  # type: ignore[attr-defined]
        found = kept.get(cut)
        if found is None:
            found = kept[cut] = FlatViews(slots)
        return found

    def view(self, flat: torch.Tensor, index: int) -> torch.Tensor:
        """Parameter `index` in `flat`, the buffer that these are of."""
        found = self._views[index]
        if found is None:
            # Without `.data` it would refer to the buffer, which holds it: neither would ever go.
            found = self._views[index] = slot_view(flat, self._slots[index]).data
        return found
