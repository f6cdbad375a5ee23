"""Memory that goes back to the system when it is not needed any more.

The C library keeps blocks of some MiB that were freed, in case they are needed again, and where small objects lie between them it
keeps several: then a process that holds one unit at a time takes the memory of four. So large buffers are mapped here.
"""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Iterator

import torch

__all__ = ["buffer", "copied", "memory_of", "row_major"]

_BLOCK = 4 << 20  # bytes that are looked at twice, for a checksum and to write them, while they are in the cache
_LARGE = 128 << 10  # below, the C library has its own place for them


def buffer(nbytes: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return so many uninitialised bytes, as a 1-D uint8 tensor."""
    if torch.device(device).type != "cpu" or nbytes < _LARGE:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return torch.frombuffer(mmap.mmap(-1, nbytes, flags=private), dtype=torch.uint8)


def copied(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a row-major copy on the CPU, converted to `dtype` where one is given."""
    dtype = tensor.dtype if dtype is None else dtype
    own = buffer(tensor.numel() * dtype.itemsize).view(dtype).view(tensor.shape)
    return own.copy_(tensor.detach())


def row_major(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself where it is row-major on the CPU, else such a copy."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return tensor if tensor.device.type == "cpu" and tensor.is_contiguous() else copied(tensor)


def memory_of(tensor: torch.Tensor) -> Iterator[memoryview]:
    """Yield the memory of a row-major tensor on the CPU, in parts. The tensor must outlive them."""
    size, address = tensor.numel() * tensor.element_size(), tensor.data_ptr()
    for at in range(0, size, _BLOCK):
        yield memoryview((ctypes.c_char * min(_BLOCK, size - at)).from_address(address + at)).cast("B")
