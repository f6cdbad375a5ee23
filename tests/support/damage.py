"""Files that are damaged or hostile, and disks that are full."""

from __future__ import annotations

import contextlib
import io
import os
import pickle
import resource
import signal
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from torch_shard.checkpoint.format.dcp_metadata import load_metadata


class Bomb:
    """Touches a file where it is unpickled."""

    def __reduce__(self) -> Any:
        return os.system, ("touch exploded",)


def flip(path: Path, position: int) -> None:
    """Flip a bit of a byte."""
    with open(path, "r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 4]))


def metadata_of(folder: Path) -> Any:
    """Return the metadata of a checkpoint of torch's form."""
    return load_metadata(io.BytesIO((folder / ".metadata").read_bytes()), "")


def write_metadata(folder: Path, metadata: Any) -> None:
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def rezipped(archive: bytes, compression: int = zipfile.ZIP_STORED, data_pkl: bytes | None = None) -> bytes:
    """Return a torch file with its members compressed, or with another pickle."""
    made = io.BytesIO()
    with zipfile.ZipFile(io.BytesIO(archive)) as old, zipfile.ZipFile(made, "w", compression) as new:
        for name in old.namelist():
            new.writestr(name, data_pkl if data_pkl is not None and name.endswith("data.pkl") else old.read(name))
    return made.getvalue()


@contextlib.contextmanager
def full_disk(nbytes: int) -> Iterator[None]:
    """Play a full disk by a limit on the size of this process's files."""
    limits, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
