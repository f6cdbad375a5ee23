"""Memory that goes back to the system when it is not needed any more.

The C library keeps blocks of some MiB that were freed, in case they are needed again, and where small objects lie between them it
keeps several: then a process that holds one unit at a time takes the memory of four. So large buffers are mapped here.
"""

from __future__ import annotations

import mmap

import torch

__all__ = ["buffer", "copied"]

_LARGE = 128 << 10  # below, the C library has its own place for them


def buffer(nbytes: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """So many uninitialised bytes, as a 1-D uint8 tensor."""
    if torch.device(device).type != "cpu" or nbytes < _LARGE:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return torch.frombuffer(mmap.mmap(-1, nbytes, flags=private), dtype=torch.uint8)


def copied(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """A row-major copy on the CPU, converted to `dtype` where one is given."""
    dtype = tensor.dtype if dtype is None else dtype
    own = buffer(tensor.numel() * dtype.itemsize).view(dtype).view(tensor.shape)
    return own.copy_(tensor.detach())
