"""Durable files, and the names of files and entries in messages."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator, Sequence

__all__ = ["make_durable", "naming", "some", "write_durable"]


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


def some(names: Sequence[str], none: str = "no entry") -> str:
    """Return the first of `names` and how many more there are, for a message."""
    return (", ".join(names[:3]) or none) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
