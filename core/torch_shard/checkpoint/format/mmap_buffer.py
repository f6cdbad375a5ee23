"""Memory of tensors as bytes, and buffers whose memory goes back to the system when they are freed.

The C library keeps freed blocks of some MiB for later, and several of them where small objects lie between. A process that holds
one unit at a time then takes the memory of four. So large buffers are mapped.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterator

import torch

_BLOCK = 4 << 20  # bytes that are read twice, for a checksum and to write them, while they are in the cache
_LARGE = 128 << 10  # bytes; smaller blocks have a place of their own in the C library


def buffer(nbytes: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Return `nbytes` uninitialised bytes as a 1-D uint8 tensor."""
    if torch.device(device).type != "cpu" or nbytes < _LARGE:
        return torch.empty(nbytes, dtype=torch.uint8, device=device)
    private = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    return torch.frombuffer(mmap.mmap(-1, nbytes, flags=private), dtype=torch.uint8)


def copied(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a row-major copy on the CPU, converted to `dtype` if one is given."""
    dtype = tensor.dtype if dtype is None else dtype
    own = buffer(tensor.numel() * dtype.itemsize).view(dtype).view(tensor.shape)
    return own.copy_(tensor.detach())


def row_major(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor itself if it is row-major on the CPU, else a copy that is."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return tensor if tensor.device.type == "cpu" and tensor.is_contiguous() else copied(tensor)


def bytes_of(tensor: torch.Tensor) -> memoryview:
    """Return the memory of a row-major tensor on the CPU."""
    # Not tensor.view(-1): a single element may have any stride.
    return tensor.as_strided((tensor.numel(),), (1,)).view(torch.uint8).numpy().data


def blocks_of(tensor: torch.Tensor) -> Iterator[memoryview]:
    """Yield the memory of a row-major tensor on the CPU in blocks of some MiB."""
    memory = bytes_of(tensor)
    for at in range(0, len(memory), _BLOCK):
        yield memory[at : at + _BLOCK]
