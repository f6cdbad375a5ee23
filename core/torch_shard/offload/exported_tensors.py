"""Plain tensors over host memory that the user was given, and whether anybody still has one.

An exported tensor has a storage of its own, over the same memory, and the version counter of the shard. The storage is shared by
everything that is made from the tensor (views, NumPy arrays), so the storage is gone when all of that is.
"""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.dlpack import from_dlpack

_data: Any = torch.Tensor.data  # type: ignore[attr-defined]


class ExportedTensor:
    """One exported tensor, as long as the user holds it."""

    __slots__ = ("_storage", "_flat")

    def __init__(self, tensor: torch.Tensor, flat: torch.Tensor | None) -> None:
        self._storage: Any = StorageWeakRef(tensor.untyped_storage())
        self._flat = None if flat is None else weakref.ref(flat)

    @staticmethod
    def of(local: torch.Tensor, flat: torch.Tensor | None) -> tuple[ExportedTensor, torch.Tensor]:
        """Export a shard in host memory, 1-D and not empty; return the record and the tensor for the user.

        Args:
            local: the shard.
            flat: the tensor that the shard is a part of.
        """
        with torch.inference_mode(False), torch.no_grad():
            # The memory is exported as bytes, since DLPack does not know all dtypes. `other` keeps `local`, and so the memory,
            # until its own storage is gone.
            other = from_dlpack(torch._C._to_dlpack(local.detach().view(torch.uint8))).view(local.dtype)
            result = local.detach()  # shares the version counter, also with what is assigned to its data
            _data.__set__(result, other)
        return ExportedTensor(result, flat), result

    def is_held(self) -> bool:
        """Return True if the user holds the tensor, or anything made from it."""
        return not self._storage.expired()

    def forget(self) -> None:
        """Drop the memory's cached norms: the user may have edited the tensor, and no version counter shows it."""
        flat = None if self._flat is None else self._flat()
        if flat is not None:
            flat.__dict__.pop("_norms", None)
