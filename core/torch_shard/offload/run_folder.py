"""A folder on disk that belongs to one process of one run, and goes with it::

    DIR/
      torch-shard-rank0-5f3a9c01/     of rank 0 of the run that uses DIR
        lock                          held by that process for as long as it lives; says who it is
        ...                           its files
      torch-shard-rank1-77b01d2e/     of rank 1
      .torch-shard.lock               held for a moment by whoever makes or looks at the above

The kernel lets go of a lock when its process ends, however that ends. So a folder whose lock is free was left by a process that
crashed, and the next one that begins in DIR deletes it. A folder whose lock is held belongs to a process that lives: of
the same run, which is fine, or of another one, which must not share the directory.
"""

from __future__ import annotations

import contextlib
import errno
import json
import multiprocessing.util
import os
import re
import secrets
import shutil
import socket
import sys
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

if sys.platform != "win32":
    import fcntl

from ..errors import DiskError, UnavailableError
from ..log import logger
from .memory_limits import host_identity

__all__ = ["RunFolder", "file_system", "locks_reach_other_hosts"]

LOCK = "lock"
_OURS = re.compile(r"torch-shard-rank\d+-[0-9a-f]{8}")
_GUARD = ".torch-shard.lock"
_PATIENCE = 120.0  # seconds for others to look through the directory; deleting much takes a while


class RunFolder:
    """An empty folder of this process's own below `directory`, which is made where it is missing.

    It is deleted by :meth:`close`, when this object is gone, when the process exits, or by the next run in the same
    directory if this process is killed. Children that this process forks leave it alone.

    Args:
        directory: shared by the ranks of one run, on any number of hosts, each with a folder of its own.
        run: the same text for all ranks of the run, and for no other run, such as a random number that they have agreed on.
        rank: of this process, for the folder's name and messages.

    Raises:
        UnavailableError: this isn't Linux.
        DiskError: the directory can't be used: another run uses it, it can't be written, or its file system keeps no locks.
    """

    def __init__(self, directory: str | os.PathLike[str], run: str, rank: int) -> None:
        if sys.platform != "linux":
            raise UnavailableError(
                f"state on disk (nvme={os.fspath(directory)!r}) needs Linux; this is {sys.platform}."
            )
        self.directory = Path(directory).absolute()
        self.owner = os.getpid()
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            with _guarded(self.directory):
                _look_around(self.directory, run)
                self.path = self.directory / f"torch-shard-rank{rank}-{secrets.token_hex(4)}"
                self.path.mkdir(mode=0o700)
                self._lock = -1
                try:
                    self._lock = os.open(self.path / LOCK, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
                    _lock(self._lock, self.path / LOCK)
                    about = {
                        "run": run,
                        "rank": rank,
                        "pid": self.owner,
                        "host": socket.gethostname(),
                        "machine": host_identity(),
                    }
                    os.write(self._lock, json.dumps(about).encode())
                except BaseException:
                    shutil.rmtree(self.path, ignore_errors=True)
                    if self._lock >= 0:
                        os.close(self._lock)
                    raise
        except OSError as error:
            raise DiskError(
                f"rank {rank}: nvme={os.fspath(directory)!r} can't be used: {error.strerror} ({error.filename}). Name a "
                "directory that every rank can write."
            ) from error
        self.file_system = file_system(self.path)[0]
        self._end = weakref.finalize(self, _release, self.path, self._lock, self.owner)
        if multiprocessing.parent_process() is not None:
            # Its processes may end without Python's exit functions, but not without its own.
            multiprocessing.util.Finalize(None, self._end, exitpriority=0)
        _of_this_process.add(self)

    @property
    def is_open(self) -> bool:
        return self._end.alive

    def close(self) -> None:
        """Delete the folder and let go of its lock. Mapped files stay readable, and keep their space, until they are unmapped."""
        self._end()


_of_this_process: weakref.WeakSet[RunFolder] = weakref.WeakSet()


def _in_child() -> None:
    """A lock belongs to all processes that have its file open: a child that outlives this process would keep it."""
    for folder in list(_of_this_process):
        if folder.is_open:
            folder._end.detach()
            with contextlib.suppress(OSError):
                os.close(folder._lock)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)


def _release(path: Path, lock: int, owner: int) -> None:
    if os.getpid() != owner:
        return
    shutil.rmtree(path, ignore_errors=True)
    os.close(lock)
    with contextlib.suppress(OSError, DiskError), _guarded(path.parent, patience=0.0):
        pass  # removes its file behind the last folder


# -- the directory ----------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def _guarded(directory: Path, patience: float = _PATIENCE) -> Iterator[None]:
    """Inside, no other process makes or judges folders in the directory."""
    path, deadline = directory / _GUARD, time.monotonic() + patience
    while True:
        guard = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
        try:
            if _lock(guard, path) and _is_at(guard, path):  # else it was removed by who held it before
                break
            if time.monotonic() > deadline:
                raise DiskError(
                    f"another process has held {path} for {patience:g} s. End that process if it hangs, or use another directory."
                )
        except BaseException:
            os.close(guard)
            raise
        os.close(guard)
        time.sleep(0.01)
    try:
        yield
    finally:
        if not any(_folders(directory)):
            with contextlib.suppress(OSError):
                os.unlink(path)
        os.close(guard)


def _lock(fd: int, path: Path) -> bool:
    """Take the lock of an open file; False if another process has it.

    Raises:
        DiskError: the file system keeps no locks.
    """
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise DiskError(
            f"the file system of {path.parent} ({file_system(path.parent)[0]}) keeps no locks ({error.strerror}), so that two "
            "runs in it could not be told apart. Use a directory on a local disk."
        ) from error
    return True


def _is_at(fd: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(fd), os.stat(path))
    except FileNotFoundError:
        return False


def _folders(directory: Path) -> Iterator[Path]:
    with os.scandir(directory) as entries:
        for entry in entries:
            if _OURS.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False):
                yield Path(entry.path)


def _look_around(directory: Path, run: str) -> None:
    """Delete what dead processes have left.

    Raises:
        DiskError: a process of another run lives.
    """
    dead: list[Path] = []
    for path in sorted(_folders(directory)):
        about: dict[str, Any] = {}
        try:
            fd = os.open(path / LOCK, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            with contextlib.suppress(OSError):
                path.rmdir()  # its process ended before it had made the lock
            continue
        except PermissionError as error:
            raise DiskError(
                f"{directory} has a folder of another user, {path.name} (uid {path.lstat().st_uid}), whose run may be using the "
                "directory. Use a directory of your own."
            ) from error
        try:
            with contextlib.suppress(ValueError):  # a process that ended before it had written it
                about = json.loads(os.read(fd, 4096))
            is_free = _lock(fd, path / LOCK)
        finally:
            os.close(fd)
        if is_free:
            dead.append(path)
            _check_dead(path, about)
        elif about.get("run") != run:
            raise DiskError(
                f"{directory} is used by another run: process {about.get('pid')} on host {about.get('host')}, its rank "
                f"{about.get('rank')} (folder {path.name}). Wait for that run to end, or give this one another directory."
            )
    for path in dead:
        shutil.rmtree(path, ignore_errors=True)
        if path.exists():
            logger.warning("%s, left by a run that was killed, can't be deleted whole; delete it by hand", path)
        else:
            logger.info("deleted %s, left by a run that was killed", path)


def _check_dead(path: Path, about: dict[str, Any]) -> None:
    """Is a free lock what it seems? Some network file systems keep locks within each host only.

    Raises:
        DiskError: the lock's owner may be alive.
    """
    if not about or host_identity() == about.get("machine") or socket.gethostname() == about.get("host"):
        return
    kind, options = file_system(path)
    if not locks_reach_other_hosts(kind, options):
        raise DiskError(
            f"{path.parent} has a folder of process {about.get('pid')} on host {about.get('host')} ({path.name}). Its lock is "
            f"free, but this file system ({kind}) may keep locks within each host only, so that its run may be alive. Delete "
            "the folder if it is not, or use another directory."
        )


# -- file systems -----------------------------------------------------------------------------------------------------

_LOCAL = {
    "ext2",
    "ext3",
    "ext4",
    "xfs",
    "btrfs",
    "zfs",
    "f2fs",
    "bcachefs",
    "jfs",
    "reiserfs",
    "tmpfs",
    "ramfs",
    "overlay",
}


def locks_reach_other_hosts(kind: str, options: str) -> bool:
    """Whether a lock that another host holds is seen here, on a file system of this type and with these mount options; true of
    local file systems, which no other host sees."""
    given = options.split(",")
    if kind in ("nfs", "nfs4"):
        return "local_lock=none" in given
    if kind == "lustre":
        return "flock" in given
    return kind in _LOCAL


def file_system(path: Path) -> tuple[str, str]:
    """Type and mount options of the file system that holds `path`, such as ``("ext4", "rw,...")``; "unknown" where the
    kernel does not say."""
    best, found = "", ("unknown", "")
    with contextlib.suppress(OSError, ValueError):
        device, real = os.stat(path).st_dev, os.path.realpath(path)
        number = f"{os.major(device)}:{os.minor(device)}"
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            mount, _, system = line.partition(" - ")
            _, _, its_number, _, at, own_options, *_ = mount.split(" ")
            kind, _, options = system.split(" ", 2)
            about = kind, f"{own_options},{options}"
            if its_number == number:
                return about
            # Subvolumes of btrfs have device numbers of their own: then it is the mount that the path lies below.
            at = at.replace("\\040", " ")
            if os.path.commonpath([at, real]) == at and len(at) >= len(best):
                best, found = at, about
    return found
