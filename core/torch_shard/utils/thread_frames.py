"""The Python frames that threads run at this moment."""

from __future__ import annotations

import gc
import sys
import threading
from types import FrameType

_lock = threading.RLock()  # a signal handler may ask, too


def frames_of_threads() -> dict[int, FrameType]:
    """Return the innermost frame of each thread, by the thread's identifier.

    CPython holds a lock of the interpreter while it makes the dict. If that started a garbage collection, a finalizer could hand
    the GIL to a thread that asks for the frames, too, and both would wait for ever (seen with 3.11).
    """
    with _lock:
        enabled = gc.isenabled()
        gc.disable()
        try:
            return sys._current_frames()
        finally:
            if enabled:
                gc.enable()
