"""The dtypes in which one parameter is stored, computed with, reduced and given its gradient."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch

from ..numerics.dtypes import FLOATS, widens

if TYPE_CHECKING:
    from .quantization import Quantized


class Dtypes(NamedTuple):
    """The dtypes of one parameter.

    Attributes:
        stored: the dtype of the parameter's shard between steps.
        compute: the dtype of the parameter while its unit is gathered.
        reduce: the dtype in which its gradient is reduced.
        grad: the dtype of ``.grad``.
        quantized: the settings by which values or gradients are sent quantized; None if they are not.
    """

    stored: torch.dtype
    compute: torch.dtype
    reduce: torch.dtype
    grad: torch.dtype
    quantized: Quantized | None = None

    def __str__(self) -> str:
        names = [str(dtype).removeprefix("torch.") for dtype in (self.stored, self.compute, self.reduce)]
        text = names[0] if len(set(names)) == 1 else f"{names[0]} ({names[1]}, reduced in {names[2]})"
        return text if self.quantized is None else f"{text} [{self.quantized.summary()}]"

    @property
    def casts(self) -> bool:
        """True if gathering changes the dtype."""
        return self.compute != self.stored

    @property
    def smallest(self) -> int:
        """The bytes of an element in the narrowest of the dtypes, on which the alignment depends."""
        return min(self.stored.itemsize, self.compute.itemsize, self.reduce.itemsize)

    def crossing(self, reduced: bool) -> torch.dtype:
        """Return the dtype in which gradients are copied to host memory.

        That is the dtype of the reduction or, without a reduction (`reduced` is False), the dtype in which modules compute
        gradients. If ``.grad`` is narrower, it is the dtype of ``.grad``. A cast to a wider dtype is exact, so that the host
        can make it.
        """
        if reduced and self.quantized is not None and self.quantized.gradients is not None:
            return self.grad  # decoded gradients are summed in this dtype
        given = self.reduce if reduced else self.compute
        return given if widens(given, self.grad) else self.grad

    @property
    def accumulated(self) -> torch.dtype:
        """The dtype of gradients that are accumulated on one rank before they are reduced."""
        wide = torch.float32 if self.stored in FLOATS and self.stored.itemsize < 4 else self.stored
        return wide if wide.itemsize > self.reduce.itemsize else self.reduce
