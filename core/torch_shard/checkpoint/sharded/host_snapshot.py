"""Host memory for the snapshot that a save in the background writes while training changes the originals.

Memory that was never touched costs several times as much as the copy into it, so it is kept for the next snapshot.
"""

from __future__ import annotations

import ctypes
from collections.abc import Hashable, Sequence

import torch

from ...comm.streams import streams_of
from ...offload.pinned import can_pin
from ...utils.tensor_memory import memory_key

_BLOCK = 64 << 20  # bytes of one allocation; a power of two, since torch rounds pinned ones up to that
_ALIGNMENT = 64


class SnapshotMemory:
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
            tensors: tensors of any dtype, shape and device.
        """
        pinned = any(can_pin(tensor.device) for tensor in tensors)
        kept, self._blocks, end = self._blocks, [], 0
        # The originals are kept, too, so that no other memory gets the same key.
        done: dict[Hashable, tuple[torch.Tensor, torch.Tensor]] = {}
        copies = []
        with torch.inference_mode(False), torch.no_grad():
            for tensor in tensors:
                tensor = tensor.detach().resolve_conj().resolve_neg()
                key = memory_key(tensor) if tensor.numel() else object()
                if key not in done:
                    if not self._blocks or end + tensor.nbytes > self._blocks[-1].numel():
                        self._blocks.append(_block(tensor.nbytes, pinned, kept))
                        end = 0
                    copy = self._blocks[-1][end : end + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
                    end += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
                    _copy(copy, tensor)
                    done[key] = copy, tensor
                copies.append(done[key][0])
        # Hazard: what is written next, in a thread of its own, is still on its way from the tensors' devices.
        for device in {tensor.device for tensor in tensors}:
            streams_of(device).synchronize()
        return copies

    def free(self) -> None:
        """Give the memory back. Earlier snapshots keep their memory."""
        self._blocks = []


def _block(nbytes: int, pinned: bool, kept: list[torch.Tensor]) -> torch.Tensor:
    """Return memory of at least `nbytes`: the first of the blocks that the last snapshot had, if it fits, or new memory."""
    if kept and kept[0].numel() >= nbytes and kept[0].is_pinned() == pinned:
        return kept.pop(0)
    kept.clear()  # freed before there is new memory
    return torch.empty(max(_BLOCK, nbytes), dtype=torch.uint8, device="cpu", pin_memory=pinned)


def _copy(into: torch.Tensor, tensor: torch.Tensor) -> None:
    if not streams_of(tensor.device).exist and tensor.is_contiguous() and tensor.nbytes >= 1 << 20:
        # memmove writes past the cache, which tensors of this size leave anyway: twice as fast as copy_.
        ctypes.memmove(into.data_ptr(), tensor.data_ptr(), tensor.nbytes)
    else:
        into.copy_(tensor, non_blocking=into.is_pinned())
