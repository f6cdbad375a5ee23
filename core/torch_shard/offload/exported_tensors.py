"""Plain tensors over memory that the host works on, and whether anybody still has one.

Such a tensor has a storage of its own, over the same memory, and the version counter of what it stands for. The storage is
shared by everything that was made from the tensor (views, NumPy arrays), so that it is gone when all of that is.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.dlpack import from_dlpack

__all__ = ["HandedOut"]

_data: Any = torch.Tensor.data  # type: ignore[attr-defined]


class HandedOut:
    """One of them."""

    __slots__ = ("_storage", "_whole")

    def __init__(self, tensor: torch.Tensor, whole: torch.Tensor | None) -> None:
        self._storage: Any = StorageWeakRef(tensor.untyped_storage())
        self._whole = None if whole is None else weakref.ref(whole)

    @staticmethod
    def of(local: torch.Tensor, whole: torch.Tensor | None) -> tuple[HandedOut, torch.Tensor]:
        """`local`, 1-D, on the host and not empty, as a tensor to hand out. `whole`: what `local` is a part of."""
        with torch.inference_mode(False), torch.no_grad():
            # As bytes: DLPack does not know all dtypes. It keeps `local`, and so the memory, until its own storage is gone.
            other = from_dlpack(torch._C._to_dlpack(local.detach().view(torch.uint8))).view(local.dtype)
            result = local.detach()  # shares the version counter, also with what is assigned to its data
            _data.__set__(result, other)
        return HandedOut(result, whole), result

    def is_held(self) -> bool:
        """Whether somebody has it, or something made from it."""
        return not self._storage.expired()

    def forget(self) -> None:
        """Nobody has it any more. No version shows whether it was edited: what was noted of the values goes."""
        whole = None if self._whole is None else self._whole()
        if whole is not None:
            whole.__dict__.pop("_norms", None)
