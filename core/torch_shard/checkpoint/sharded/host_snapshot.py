"""Host memory for the snapshot that a save in the background writes while training changes the originals.

Memory that was never touched costs several times as much as the copy into it, so it is kept for the next snapshot.
"""

from __future__ import annotations

import ctypes
from collections.abc import Hashable, Sequence

import torch

from ...utils.tensor_memory import memory_key

__all__ = ["Staging"]

_BLOCK = 256 << 20  # bytes of one allocation; a power of two, since torch rounds pinned ones up to that
_ALIGNMENT = 64


class Staging:
    """Memory that snapshots are copied to, one at a time. Not collective."""

    def __init__(self) -> None:
        self._blocks: list[torch.Tensor] = []

    @property
    def nbytes(self) -> int:
        """The number of bytes that are held now."""
        return sum(block.numel() for block in self._blocks)

    def snapshot(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Return copies on the CPU, row-major, valid until the next call. The same memory given twice is copied once.

        Args:
            tensors: of any dtype, shape and device.
        """
        places: dict[Hashable, int] = {}
        positions = []
        unique: list[torch.Tensor] = []
        for tensor in tensors:
            tensor = tensor.detach().resolve_conj().resolve_neg()
            key = memory_key(tensor)
            if not tensor.numel() or key not in places:
                places[key] = len(unique)
                unique.append(tensor)
            positions.append(places[key])
        with torch.inference_mode(False), torch.no_grad():
            slots = self._slots([tensor.nbytes for tensor in unique], any(t.is_cuda for t in unique))
            copies = []
            for tensor, slot in zip(unique, slots, strict=True):
                copy = slot.view(tensor.dtype).view(tensor.shape)
                _copy(copy, tensor)
                copies.append(copy)
        if any(t.device.type not in ("cpu", "meta") for t in unique):
            torch.accelerator.synchronize()
        return [copies[position] for position in positions]

    def free(self) -> None:
        """Give the memory back. Earlier snapshots keep theirs."""
        self._blocks = []

    def _slots(self, sizes: list[int], pinned: bool) -> list[torch.Tensor]:
        """Return parts of the blocks, of `sizes` bytes, in order."""
        wanted: list[int] = []  # of each block
        places: list[tuple[int, int]] = []
        for size in sizes:
            room = -(-size // _ALIGNMENT) * _ALIGNMENT
            if not wanted or wanted[-1] + room > max(_BLOCK, room):
                wanted.append(0)
            places.append((len(wanted) - 1, wanted[-1]))
            wanted[-1] += room
        kept = self._blocks
        if len(kept) != len(wanted) or any(
            b.numel() != n or b.is_pinned() != pinned for b, n in zip(kept, wanted, strict=True)
        ):
            self._blocks = []  # before the new ones are made
            del kept
            self._blocks = [torch.empty(n, dtype=torch.uint8, device="cpu", pin_memory=pinned) for n in wanted]
        return [self._blocks[block][start : start + size] for (block, start), size in zip(places, sizes, strict=True)]


def _copy(into: torch.Tensor, tensor: torch.Tensor) -> None:
    if tensor.device.type == "cpu" and tensor.is_contiguous() and tensor.nbytes >= 1 << 20:
        # memmove writes past the cache, which tensors of this size leave anyway: twice as fast as copy_.
        ctypes.memmove(into.data_ptr(), tensor.data_ptr(), tensor.nbytes)
    else:
        into.copy_(tensor, non_blocking=into.is_pinned())
