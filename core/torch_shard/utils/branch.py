"""A branch of this process: a copy, made by ``fork``, that goes on by itself, returns one result, and ends.

The branch has all objects, and a single thread, the one that called :func:`branch`. Memory is shared until one of the two
processes writes to it.
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
    """The handle by which a branch ends and returns its result; only the branch itself has it."""

    def __init__(self, pipe: int):
        self._pipe = pipe

    def end(self, result: object) -> NoReturn:
        """End the process and send `result`, which can be pickled, to :func:`branch`, which raises it if it is an error.

        Nothing is cleaned up, because open files and groups belong to the process that branched.
        """
        text = pickle.dumps(result)
        with os.fdopen(self._pipe, "wb") as pipe:
            pipe.write(len(text).to_bytes(8, "little") + text)
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(0)


def branch() -> Branch | Any:
    """Branch, and return twice: at once a :class:`Branch` in the new process, and later that branch's result in this one.

    Raises:
        ShardError: the branch has ended without a result. An error that is its result is raised as it is.
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
        pickled = pipe.read(int.from_bytes(size, "little"))
    _, status = os.waitpid(pid, 0)
    if len(size) < 8 or len(pickled) < int.from_bytes(size, "little"):
        code = os.waitstatus_to_exitcode(status)
        how = f"by {signal.Signals(-code).name}" if code < 0 else f"with exit code {code}"
        raise ShardError(f"the copy of this process that ran the script was ended {how} before it had a result.")
    result = pickle.loads(pickled)
    if isinstance(result, Exception):
        raise result
    return result
