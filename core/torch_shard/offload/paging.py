"""Pages of a mapped file: fetched before they are needed, written out, and given back to the system. Linux.

Through ctypes, since the functions must let other threads run: Python's own ``mmap.madvise`` and ``mmap.flush`` keep all of them
waiting for the disk.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import mmap
import os
from collections.abc import Callable
from typing import Any

import torch

__all__ = ["drop", "fetch", "resident", "unmap_pages", "write_out"]

_WILLNEED, _DONTNEED = 3, 4
_POPULATE_READ, _POPULATE_WRITE = 22, 23  # since Linux 5.14
_WAIT_BEFORE_WRITE_WAIT_AFTER = 1 | 2 | 4
_CHUNK = 16 << 20  # bytes; between two of them whoever wants to change the address space gets its turn
_HWPOISON = 133


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    libc.sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return libc


def _madvise(address: int, nbytes: int, advice: int) -> int:
    """0, or the number of the error."""
    return ctypes.get_errno() if _libc().madvise(address, nbytes, advice) else 0


def fetch(address: int, nbytes: int, *, for_writing: bool, go_on: Callable[[], bool]) -> bool:
    """Read the pages in and map them, so that their use takes no page fault. Blocks for as long as the disk needs.

    Pages to be written are best fetched `for_writing`: else each one's first write is a page fault. They will be written out
    then, changed or not.

    Args:
        address: where the mapping begins.
        go_on: asked now and then; False ends it.

    Returns:
        Whether it came to its end.

    Raises:
        OSError: a page can't be read (or, on a file system that copies on write, has no place to be written to). Its use would
            end the process by SIGBUS.
    """
    _madvise(address, nbytes, _WILLNEED)  # asks the disk for all of it; what follows waits page by page
    advice = _POPULATE_WRITE if for_writing else _POPULATE_READ
    for at in range(0, nbytes, _CHUNK):
        if not go_on():
            return False
        while (error := _madvise(address + at, min(_CHUNK, nbytes - at), advice)) == errno.EINTR:
            pass
        if error in (errno.EFAULT, _HWPOISON):
            raise OSError(errno.EIO, "input/output error, the file was cut, or the disk is full")
        if error:  # an older kernel, or no memory just now: pages come when they are used
            return True
    return True


def unmap_pages(address: int, nbytes: int) -> None:
    """Take the pages out of this process's page table. What was written stays in the page cache; the next use finds it there."""
    _madvise(address, nbytes, _DONTNEED)


def write_out(fd: int) -> None:
    """Have everything that was changed written to the disk, and wait for it. Not durable: metadata may be missing.

    Raises:
        OSError: it can't be written.
    """
    if _libc().sync_file_range(fd, 0, 0, _WAIT_BEFORE_WRITE_WAIT_AFTER) == 0:
        return
    if (error := ctypes.get_errno()) not in (errno.ENOSYS, errno.EINVAL, errno.ESPIPE, errno.EOPNOTSUPP):
        raise OSError(error, os.strerror(error))
    os.fdatasync(fd)


def drop(fd: int) -> None:
    """Take a file's pages, which are written and not mapped, out of the page cache."""
    os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)


def resident(address: int, nbytes: int) -> int:
    """Bytes of a mapping that are in memory: mapped, or in the page cache."""
    pages = -(-nbytes // mmap.PAGESIZE)
    found = (ctypes.c_ubyte * pages)()
    if _libc().mincore(address, nbytes, found):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int((torch.frombuffer(found, dtype=torch.uint8) & 1).sum()) * mmap.PAGESIZE
