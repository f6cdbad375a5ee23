"""Pages of a file that is mapped into memory: fetched before they are needed, written out, and given back to the system. Linux.

The functions are called through ctypes, since they must let other threads run: Python's own ``mmap.madvise`` and ``mmap.flush``
keep all threads waiting for the disk.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import os
from collections.abc import Callable
from typing import Any

_WILLNEED = 3
_PAGEOUT = 21  # since Linux 5.4
_POPULATE_WRITE = 23  # since Linux 5.14
_MS_SYNC = 4
_CHUNK = 16 << 20  # bytes; between two chunks other threads that want to change the address space get their turn
_HWPOISON = 133


@functools.cache
def _libc() -> Any:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.madvise.argtypes = libc.msync.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    return libc


def _madvise(address: int, nbytes: int, advice: int) -> int:
    """Return 0, or the number of the error."""
    return ctypes.get_errno() if _libc().madvise(address, nbytes, advice) else 0


def fetch(address: int, nbytes: int, *, go_on: Callable[[], bool]) -> None:
    """Read the pages in and map them for writing, so that their use takes no page fault. Blocks for as long as the disk needs.

    The pages will be written out then, changed or not.

    Args:
        address: the address of the mapping's first byte.
        nbytes: the length of the mapping.
        go_on: a function that is asked now and then; False ends the reading.

    Raises:
        OSError: a page can't be read (or, on a file system that copies on write, has no place to be written to). Its use would
            end the process by SIGBUS.
    """
    _madvise(address, nbytes, _WILLNEED)  # asks the disk for all pages; what follows waits page by page
    for at in range(0, nbytes, _CHUNK):
        if not go_on():
            return
        # Other errors (an older kernel, no memory just now) are none: the pages come when they are used.
        if _madvise(address + at, min(_CHUNK, nbytes - at), _POPULATE_WRITE) in (errno.EFAULT, _HWPOISON):
            raise OSError(errno.EIO, "input/output error, the file was cut, or the disk is full")


def write_out(address: int, nbytes: int) -> None:
    """Write the changed pages to the disk, and wait for that.

    Raises:
        OSError: they can't be written.
    """
    if _libc().msync(address, nbytes, _MS_SYNC):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def drop(address: int, nbytes: int) -> None:
    """Give the memory of pages that were written out back to the system. An older kernel takes it when it needs memory."""
    _madvise(address, nbytes, _PAGEOUT)
