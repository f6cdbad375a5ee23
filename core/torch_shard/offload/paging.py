"""Pages of a file that is mapped in parts: fetched before they are needed, written out, and given back to the system. Linux.

Through ctypes, since the functions must let other threads run: Python's own ``mmap.madvise`` and ``mmap.flush`` keep all of them
waiting for the disk. And Python's ``mmap`` takes a file descriptor for each part.
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

__all__ = ["drop", "fetch", "map_shared", "punch", "resident", "unmap", "unmap_pages", "write_out"]

_WILLNEED, _DONTNEED = 3, 4
_POPULATE_WRITE = 23  # since Linux 5.14
_WAIT_BEFORE_WRITE_WAIT_AFTER = 1 | 2 | 4
_KEEP_SIZE_PUNCH_HOLE = 1 | 2
_CHUNK = 16 << 20  # bytes; between two of them whoever wants to change the address space gets its turn
_HWPOISON = 133


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.mincore.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p]
    libc.sync_file_range.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_int64]
    libc.mmap.restype = ctypes.c_void_p
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    return libc


def _madvise(address: int, nbytes: int, advice: int) -> int:
    """Return 0, or the number of the error."""
    return ctypes.get_errno() if _libc().madvise(address, nbytes, advice) else 0


def map_shared(fd: int, offset: int, nbytes: int) -> Any:
    """Map a part of a file: return its memory, an object with Python's buffer interface. :func:`unmap` ends it.

    Raises:
        OSError: it can't be mapped.
    """
    flags = mmap.PROT_READ | mmap.PROT_WRITE
    address = _libc().mmap(None, nbytes, flags, mmap.MAP_SHARED, fd, offset)
    if address == ctypes.c_void_p(-1).value:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return (ctypes.c_ubyte * nbytes).from_address(address)


def unmap(address: int, nbytes: int) -> None:
    """Take a mapping out of the address space. What was written is in the file."""
    _libc().munmap(address, nbytes)


def fetch(address: int, nbytes: int, *, go_on: Callable[[], bool]) -> bool:
    """Read the pages in and map them for writing, so that their use takes no page fault. Blocks for as long as the disk needs.

    They will be written out then, changed or not.

    Args:
        address: where the mapping begins.
        go_on: asked now and then; False ends it.

    Returns:
        True if it came to its end.

    Raises:
        OSError: a page can't be read (or, on a file system that copies on write, has no place to be written to). Its use would
            end the process by SIGBUS.
    """
    _madvise(address, nbytes, _WILLNEED)  # asks the disk for all of it; what follows waits page by page
    for at in range(0, nbytes, _CHUNK):
        if not go_on():
            return False
        while (error := _madvise(address + at, min(_CHUNK, nbytes - at), _POPULATE_WRITE)) == errno.EINTR:
            pass
        if error in (errno.EFAULT, _HWPOISON):
            raise OSError(errno.EIO, "input/output error, the file was cut, or the disk is full")
        if error:  # an older kernel, or no memory just now: pages come when they are used
            return True
    return True


def unmap_pages(address: int, nbytes: int) -> None:
    """Take the pages out of this process's page table. What was written stays in the page cache; the next use finds it there."""
    _madvise(address, nbytes, _DONTNEED)


def write_out(fd: int, offset: int, nbytes: int) -> None:
    """Have what was changed in a part of a file written to the disk, and wait for it. Not durable: metadata may be missing.

    Raises:
        OSError: it can't be written.
    """
    if _libc().sync_file_range(fd, offset, nbytes, _WAIT_BEFORE_WRITE_WAIT_AFTER) == 0:
        return
    if (error := ctypes.get_errno()) not in (errno.ENOSYS, errno.EINVAL, errno.ESPIPE, errno.EOPNOTSUPP):
        raise OSError(error, os.strerror(error))
    os.fdatasync(fd)


def drop(fd: int, offset: int, nbytes: int) -> None:
    """Take the pages that lie whole in a part of a file out of the page cache. They are written, and not mapped."""
    os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)


def punch(fd: int, offset: int, nbytes: int) -> bool:
    """Give the disk's space of a part of a file back, which holds zeros then. Return False where the file system can't."""
    return bool(_libc().fallocate(fd, _KEEP_SIZE_PUNCH_HOLE, offset, nbytes) == 0)


def resident(address: int, nbytes: int) -> int:
    """Return the bytes of a mapping that are in memory: mapped, or in the page cache."""
    pages = -(-nbytes // mmap.PAGESIZE)
    found = (ctypes.c_ubyte * pages)()
    if _libc().mincore(address, nbytes, found):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return int((torch.frombuffer(found, dtype=torch.uint8) & 1).sum()) * mmap.PAGESIZE
