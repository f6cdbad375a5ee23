"""Page-locked host memory, from and to which a GPU can copy while the host goes on.

It is ordinary memory that is page-locked afterwards. torch's own page-locked memory comes from a cache that rounds each request
up to a power of two, so that a shard of 1.1 GiB would take 2 GiB, and keeps what is given back.

A copy with ``non_blocking=True`` goes on by itself only where the tensor is page-locked. torch keeps no list of what is: it asks
the CUDA runtime (``cudaPointerGetAttributes``, in ``CUDAHooks::isPinnedPtr``), whoever has locked it. So ``tensor.is_pinned()``
is true for the memory made here, and for views of it.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import weakref
from typing import Any

import torch

from ..comm.streams import streams_of
from ..errors import HostMemoryError, PinnedMemoryError
from .memory_limits import formatted

_PORTABLE = 1  # cudaHostRegisterPortable: locked for all devices, not only for the current one
_HUGE = 2 << 20


def can_pin(device: torch.device) -> bool:
    """Return True if memory can be page-locked for copies to and from `device`: a CUDA or ROCm device that is there."""
    return device.type == "cuda" and torch.cuda.is_available()


def allocate(numel: int, dtype: torch.dtype, *, pin: bool, device: torch.device) -> torch.Tensor:
    """Return host memory of its own: a 1-D tensor of zeros, which begins at a page. Not collective.

    It goes back to the system, not to a cache, when the last tensor that views it is gone. Code that copies to or from it with
    ``non_blocking=True`` keeps it until the copy has ended: unlike that of torch's allocator it is not kept by copies. (When
    it is given back, `device` is waited for, so that a copy which was forgotten does no harm.)

    Forked children see plain memory as it was at the fork, but page-locked memory not at all, as it is with torch's: a read there
    ends the child. Else each fork (of a data loader's worker) would copy all of it, since the kernel can't share such pages.

    Args:
        numel: number of elements; with 0 nothing is page-locked.
        dtype: any with whole bytes.
        pin: page-lock the memory. Without effect where :func:`can_pin` is false.
        device: the device that the memory is copied to and from.

    Raises:
        HostMemoryError: the system does not provide more memory.
        PinnedMemoryError: the memory can't be page-locked. It has been given back.
    """
    nbytes = numel * dtype.itemsize
    if nbytes == 0:
        return torch.empty(0, dtype=dtype, device="cpu")
    try:
        memory = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, ValueError, OverflowError) as error:
        raise HostMemoryError(
            f"the system does not provide {formatted(nbytes)} of memory for offload: {error}."
        ) from error
    if nbytes >= _HUGE and hasattr(mmap, "MADV_HUGEPAGE"):
        # Fewer pages to lock and to look up; without effect where the machine has that switched off.
        with contextlib.suppress(OSError):
            memory.madvise(mmap.MADV_HUGEPAGE)
    tensor = torch.frombuffer(memory, dtype=torch.uint8).view(dtype)
    if pin and can_pin(device):
        _lock(tensor, memory, torch.cuda.cudart(), device)
    return tensor


def _lock(tensor: torch.Tensor, memory: mmap.mmap, runtime: Any, device: torch.device) -> None:
    """Page-lock `memory`, which `tensor` views, until nothing views it any more."""
    address, nbytes = tensor.data_ptr(), tensor.nbytes
    memory.madvise(mmap.MADV_DONTFORK)
    status = runtime.cudaHostRegister(address, nbytes, _PORTABLE)
    if int(status) != 0:
        reason = runtime.cudaGetErrorString(status)
        _clear_error(device)
        raise PinnedMemoryError(
            f"{formatted(nbytes)} of host memory can't be page-locked for {device}: {reason} (cudaHostRegister, error "
            f"{int(status)}). "
            "With Offload(pin_memory=False) ordinary memory is used; copies then block the host."
        )
    # Not on the tensor: others view the same memory. `memory` among the arguments keeps it mapped until it is unlocked.
    unlock = weakref.finalize(tensor.untyped_storage(), _unlock, memory, runtime, address, device, os.getpid())
    unlock.atexit = False  # the end of the process does it, and threads may still be copying then


def _unlock(memory: mmap.mmap, runtime: Any, address: int, device: torch.device, owner: int) -> None:
    if os.getpid() != owner:
        return  # in a forked child: neither the memory nor CUDA is there
    with contextlib.suppress(RuntimeError, AssertionError):  # a device that has failed, or is gone, copies nothing
        streams_of(device).synchronize()
    runtime.cudaHostUnregister(address)


def _clear_error(device: torch.device) -> None:
    """Take back the error that the CUDA runtime remembers: else the launch of the next kernel, of any code, reports it."""
    with contextlib.suppress(RuntimeError, AssertionError):
        torch.empty(1, device=device).fill_(0)
