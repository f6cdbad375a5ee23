"""Durable files, and messages about files and their entries."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator, Sequence

from ...errors import CheckpointError

Progress = Callable[[int], object]
"""A function that is called with the number of bytes after each step of some work."""


@contextlib.contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Add the file's name to an OSError from the body: the system gives a number only, and a full disk may be one of several."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


def make_durable(path: str | os.PathLike[str]) -> None:
    """Flush a closed file, or the names in a directory, to the disk."""
    fd = os.open(path, os.O_RDONLY)
    try:
        with naming(path):
            os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems can't, and needn't
            raise
    finally:
        os.close(fd)


def write_durable(path: str | os.PathLike[str], raw: bytes) -> None:
    """Write a file and flush it to the disk."""
    with naming(path), open(path, "wb") as file:
        file.write(raw)
        file.flush()
        os.fsync(file.fileno())


def damaged(path: str | os.PathLike[str], error: Exception, held: str = "") -> CheckpointError:
    """Return the error for a file that can't be read to its end. `held` is a clause about what is in it."""
    return CheckpointError(
        f"{path} is damaged or was cut off at {os.stat(path).st_size} bytes{held} ({type(error).__name__}: {first_line(error)}). "
        "Nothing was loaded. Load an earlier checkpoint, or copy the file again."
    )


def unsupported(text: str) -> CheckpointError:
    """Return the error for a checkpoint that need not be damaged, but is of a form that this version can't read."""
    error = CheckpointError(text)
    error._is_unsupported = True
    return error


def first_line(error: Exception) -> str:
    """Return the first line of an error's message, which may be empty."""
    return next(iter(str(error).strip().splitlines()), "no reason given")


def some(names: Sequence[str], none: str = "no entry") -> str:
    """Return the first of `names` and how many more there are, for a message."""
    return (", ".join(names[:3]) or none) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
