"""The dtypes in which one parameter is stored, computed with, reduced and given its gradient."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ..layout.flat_layout import ALIGNMENT
from ..numerics.dtypes import FLOATS, widens

if TYPE_CHECKING:
    from .quantization import Quantized

__all__ = ["Dtypes"]


@dataclass(frozen=True)
class Dtypes:
    """Of one parameter: between steps, while its unit is gathered, in the reduction of its gradient, and of ``.grad``; and where
    values or gradients are sent as codes of them, how."""

    stored: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype
    grad: torch.dtype
    quantized: Quantized | None = None

    def __str__(self) -> str:
        names = [str(dtype).removeprefix("torch.") for dtype in (self.stored, self.compute, self.reduce)]
        said = names[0] if len(set(names)) == 1 else f"{names[0]} ({names[1]}, reduced in {names[2]})"
        return said if self.quantized is None else f"{said} [{self.quantized.summary()}]"

    @property
    def casts(self) -> bool:
        """Whether gathering changes the dtype."""
        return self.compute != self.stored

    @property
    def smallest(self) -> int:
        """Bytes of an element in the narrowest of them, which alignment follows."""
        return min(self.stored.itemsize, self.compute.itemsize, self.reduce.itemsize)

    @property
    def alignment(self) -> int:
        """Bytes in storage to which starts are aligned, so that they are to 16 bytes in each of the dtypes."""
        return ALIGNMENT * self.stored.itemsize // self.smallest

    def crossing(self, reduced: bool) -> torch.dtype:
        """In which gradients go to host memory: that of the reduction or, where nothing is `reduced`, that in which modules give
        them; in that of ``.grad`` unless it is wider. A cast to a wider one is exact, and can as well be made there."""
        if reduced and self.quantized is not None and self.quantized.gradients is not None:
            return self.grad  # as which codes are added up
        given = self.reduce if reduced else self.compute
        return given if widens(given, self.grad) else self.grad

    @property
    def accumulated(self) -> torch.dtype:
        """Of gradients that are summed on one rank before they are reduced."""
        wide = torch.float32 if self.stored in FLOATS and self.stored.itemsize < 4 else self.stored
        return wide if wide.itemsize > self.reduce.itemsize else self.reduce
