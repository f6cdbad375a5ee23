"""How much of tensors that are mapped from a disk is in memory."""

from __future__ import annotations

import ctypes
import mmap

__all__ = ["SPARE", "resident"]

SPARE = 1 << 18
"""Bytes that the kernel may keep for a moment: each CPU has a few pages in a list of those that were just touched."""


def resident(address: int, nbytes: int) -> int:
    """Bytes of a mapping that are mapped or in the page cache."""
    libc = ctypes.CDLL(None, use_errno=True)
    pages = (ctypes.c_ubyte * -(-nbytes // mmap.PAGESIZE))()
    assert libc.mincore(ctypes.c_void_p(address), ctypes.c_size_t(nbytes), pages) == 0
    return sum(page & 1 for page in pages) * mmap.PAGESIZE
