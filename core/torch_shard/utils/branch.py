"""A branch of this process: a copy that goes on by itself, tells one result, and ends.

As ``fork`` does it: the copy has all objects, of threads only the one that branches, and no memory of its own until it writes.
"""

from __future__ import annotations

import os
import pickle
import signal
import sys
from typing import Any, NoReturn

import torch

from ..errors import ShardError


class Branch:
    """What a branch is to itself: the end at which it tells its result."""

    def __init__(self, pipe: int):
        self._pipe = pipe

    def end(self, result: object) -> NoReturn:
        """End the process and tell `result`, which can be pickled; an error is raised by :func:`branch`.

        Nothing is cleaned up: what was open belongs to the process that branched.
        """
        text = pickle.dumps(result)
        with os.fdopen(self._pipe, "wb") as pipe:
            pipe.write(len(text).to_bytes(8, "little") + text)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def branch() -> Branch | Any:
    """Branch, and return twice: at once a :class:`Branch` in the new process, and here the result that it has told.

    Raises:
        ShardError: here, the error that the branch told, or that it has ended without a result.
    """
    sys.stdout.flush()  # else both processes would write what is buffered
    sys.stderr.flush()
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        torch.set_num_threads(1)  # the threads of OpenMP were not copied
        return Branch(write)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        size = pipe.read(8)  # not to the end, which processes that the branch has started may hold open
        told = pipe.read(int.from_bytes(size, "little"))
    _, status = os.waitpid(pid, 0)
    if not told:
        code = os.waitstatus_to_exitcode(status)
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        raise ShardError(f"the copy of this process that ran the script was ended {how} before it had a result.")
    result = pickle.loads(told)
    if isinstance(result, Exception):
        raise result
    return result
