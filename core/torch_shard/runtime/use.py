"""A forward of a unit, as backward will find it."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from ..errors import UnitStateError

if TYPE_CHECKING:
    from ..unit.unit import Unit


class Use:
    """One forward of a unit, to which backward will come: the sequence numbers of its nodes, and what autograd saved."""

    __slots__ = ("__weakref__", "end", "looks_up", "saved", "start", "task", "unit", "versions")

    def __init__(self, unit: Unit, start: int, looks_up: bool = False) -> None:
        """Begin a use. `looks_up`: the use is an embedding's, whose backward needs the indices, and not the weight."""
        self.unit, self.start, self.end, self.saved, self.task = unit, start, start, True, -1
        self.looks_up = looks_up
        # The parameters that autograd has saved: number of the flat buffer, index, version.
        self.versions: list[tuple[int, int, int]] = []

    def check(self) -> None:
        """Raise if a saved parameter has changed, because backward would get other values than forward had.

        Plain torch raises then, too.
        """
        flats = self.unit.flats
        with torch._C.DisableTorchFunctionSubclass():
            for number, i, version in self.versions:
                flat = flats[number]
                if flat.params[i]._version != version:
                    raise UnitStateError(
                        f"rank {flat.collectives.world_rank}: {flat.layout.slots[i].name} was changed in place (by an "
                        "optimizer's step, perhaps) after a forward whose backward is running now and needs the earlier "
                        "value. Call backward before the change, or run the forward again after it."
                    )
