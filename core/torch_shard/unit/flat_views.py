"""Views of a gradient buffer, one for each parameter.

The views are kept on the buffer's tensor, because units of one shape take the same memory in turn.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch

from ..layout.flat_layout import Slot, slot_view

__all__ = ["Cut", "cut_of", "views_of"]

Cut: TypeAlias = tuple[tuple[tuple[int, ...], tuple[int, ...], int], ...]
"""Shape, strides and offset of each parameter of a layout, without the parameters' names."""


def cut_of(slots: Sequence[Slot]) -> Cut:
    """Return the cut of the layout with these slots, under which its views are kept."""
    return tuple((slot.shape, slot.stride, slot.offset) for slot in slots)


def views_of(flat: torch.Tensor, slots: Sequence[Slot], cut: Cut) -> list[torch.Tensor]:
    """Return the views of `flat`, 1-D, for a layout with these slots; `cut` is their :func:`cut_of`.

    They are valid as long as the buffer keeps its memory.
    """
    kept: dict[Cut, list[torch.Tensor]] | None = getattr(flat, "_cuts", None)
    if kept is None:
        kept = flat._cuts = {}  # type: ignore[attr-defined]
    found = kept.get(cut)
    if found is None:
        # `.data` breaks the reference cycle: a plain view would refer to the buffer, which refers to the view.
        found = kept[cut] = [slot_view(flat, slot).data for slot in slots]
    return found
