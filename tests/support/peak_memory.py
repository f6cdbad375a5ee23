"""Peaks of the memory of this process that no file backs. Linux only."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading
from collections.abc import Iterator
from pathlib import Path

__all__ = ["Peak", "peak", "return_freed_memory"]


def anonymous() -> int:
    """Bytes of this process that no file backs."""
    lines = Path("/proc/self/smaps_rollup").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("Anonymous:"))


def return_freed_memory() -> None:
    """Have the memory of freed tensors go back at once from now on, in this process, and not be kept for later ones."""
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).mallopt(-3, 256 << 10)  # M_MMAP_THRESHOLD, which else grows with what is freed


class Peak:
    """The highest value above that at the beginning."""

    def __init__(self) -> None:
        self.bytes = 0


@contextlib.contextmanager
def peak() -> Iterator[Peak]:
    """Return a context that measures; what was freed before and not given back is given back first, else it would not be seen."""
    gc.collect()
    with contextlib.suppress(AttributeError, OSError):
        ctypes.CDLL(None).malloc_trim(0)
    found, stop, base = Peak(), threading.Event(), anonymous()

    def look() -> None:
        while not stop.wait(0.0005):
            found.bytes = max(found.bytes, anonymous() - base)

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield found
    finally:
        stop.set()
        thread.join()
