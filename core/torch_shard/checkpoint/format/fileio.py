"""Files that are written by their descriptor, and names in messages: what goes wrong names the file."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Sequence

__all__ = ["make_durable", "naming", "some"]


@contextlib.contextmanager
def naming(path: str | os.PathLike[str]) -> Iterator[None]:
    """Give an OSError from inside the file's name: the system knows only a number, and a full disk may be one of several."""
    try:
        yield
    except OSError as error:
        if error.errno is None or error.filename is not None:
            raise
        raise OSError(error.errno, error.strerror, os.fspath(path)) from error


def make_durable(path: str | os.PathLike[str]) -> None:
    """Have on the disk what was written to a file and closed, or the names in a directory."""
    fd = os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    try:
        with naming(path):
            os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems can't, and needn't
            raise
    finally:
        os.close(fd)


def some(names: Sequence[str], none: str = "no entry") -> str:
    """Return the first names of many, for a message."""
    return (", ".join(names[:3]) or none) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
