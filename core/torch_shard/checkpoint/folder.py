"""A checkpoint's directory: whole or not there, whatever happens while it is made.

Everything is written into ``.<name>.saving-<nonce>`` beside the target and made durable; then the two change places in one
step, and what was at the target is deleted under the hidden name::

    step-100/                      the checkpoint of before      ->  the new one
    .step-100.saving-0123abcd/     the new one, being written    ->  the old one, being deleted

A process killed at any moment leaves the old one or the new one at the target, both whole, and a hidden directory that the
next save removes. The process that saves holds a lock on a file in it, which the kernel lets go with the process: that is how
the next save knows a dead one. File systems that can't exchange two directories get two renames, and between them the
old one has the hidden name ``.<name>.previous-<nonce>``, under which it is found.

Nothing here is collective: one rank does this for all.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import os
import re
import secrets
import shutil
import time
from pathlib import Path

from ..errors import CheckpointError
from ..log import logger
from .dcp import METADATA
from .manifest import MANIFEST, Manifest, read_manifest

__all__ = ["PROBE", "Saving", "commit", "discard", "find", "hidden", "pattern", "prune", "sees", "sync", "tidy"]

PROBE = ".probe"
"""In a directory that is being written: proves that ranks see the same one, and is locked by the rank that made it."""

_HIDDEN = re.compile(r"\.(?P<name>.+)\.(?P<kind>saving|previous)-[0-9a-f]{16}")
_EXCHANGE = 2  # RENAME_EXCHANGE of renameat2(2)
_AT_FDCWD = -100


class Saving:
    """A hidden directory that is being written, locked until :meth:`close`."""

    def __init__(self, path: Path, nonce: str, lock: int) -> None:
        self.path, self.nonce, self._lock = path, nonce, lock

    @classmethod
    def begin(cls, target: Path, nonce: str) -> Saving:
        """Make a directory beside `target`, and its parents; remove what dead saves have left there.

        Args:
            target: where the checkpoint will be.
            nonce: sixteen hexadecimal digits, never used before.

        Raises:
            CheckpointError: what is at the target is no checkpoint, and would be lost.
            OSError: the directory can't be made.
        """
        _refuse_to_replace(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        tidy(target)
        path = hidden(target, nonce)
        path.mkdir()
        lock = -1
        try:
            lock = os.open(path / PROBE, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.write(lock, nonce.encode())
        except OSError:
            if lock >= 0:
                os.close(lock)
            shutil.rmtree(path, ignore_errors=True)
            raise
        return cls(path, nonce, lock)

    def close(self, remove: bool = False) -> None:
        """Let go of the lock; with `remove` delete what is there."""
        if remove:
            _delete(self.path)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def hidden(target: Path, nonce: str) -> Path:
    """Where a checkpoint is written."""
    return target.parent / f".{target.name}.saving-{nonce}"


def sees(path: Path, nonce: str) -> bool:
    """Whether this process sees the directory that another one made, and not one of the same name elsewhere."""
    try:
        return (path / PROBE).read_text() == nonce
    except OSError:
        return False


def _refuse_to_replace(target: Path) -> None:
    if target.is_symlink() or not target.exists():
        return
    if not target.is_dir():
        raise CheckpointError(f"{target} is a file; a checkpoint is a directory. Give another path, or delete it.")
    names = os.listdir(target)
    if names and MANIFEST not in names and METADATA not in names:
        raise CheckpointError(
            f"{target} exists and holds no checkpoint ({', '.join(sorted(names)[:3])}), so it would be lost. Give another path, "
            "for example a directory inside it."
        )


def sync(path: Path) -> None:
    """Make the names in a directory durable."""
    fd = os.open(path, os.O_RDONLY | getattr(os, "O_DIRECTORY", 0))
    try:
        os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems can't, and needn't
            raise
    finally:
        os.close(fd)


# -- to the target ----------------------------------------------------------------------------------------------------


def commit(saving: Saving, target: Path) -> None:
    """Put a durable directory in the target's place, in one step. The old one is left to :func:`discard`.

    Raises:
        OSError: nothing has changed then, or the new one is in place and only its name may not be durable.
    """
    sync(saving.path)
    if not os.path.lexists(target):
        os.rename(saving.path, target)
    elif not _exchange(saving.path, target):
        os.rename(target, _aside(target, saving.nonce))
        os.rename(saving.path, target)
    sync(target.parent)
    # Not before: without it another program's save beside this one would take it for one that died.
    with contextlib.suppress(OSError):
        (target / PROBE).unlink()


def _aside(target: Path, nonce: str) -> Path:
    return target.parent / f".{target.name}.previous-{nonce}"


def discard(target: Path, nonce: str, rank: int = 0, ranks: int = 1) -> None:
    """Delete what was at the target before a commit; what `rank` 0 does suffices, but large files take their time."""
    for old in (hidden(target, nonce), _aside(target, nonce)):
        if ranks > 1 and old.is_dir() and not old.is_symlink():
            with contextlib.suppress(OSError):
                for name in sorted(os.listdir(old))[rank::ranks]:
                    with contextlib.suppress(OSError):
                        (old / name).unlink()
        if rank == 0:
            _delete(old)


def _exchange(one: Path, other: Path) -> bool:
    """Exchange two names; False where the system can't."""
    try:
        renameat2 = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError):
        return False
    if renameat2(_AT_FDCWD, os.fsencode(one), _AT_FDCWD, os.fsencode(other), _EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP, errno.EPERM):
        return False
    raise OSError(code, os.strerror(code), str(other))


def _delete(path: Path) -> None:
    """Delete what a hidden name leads to; failing is no reason to fail, for the next save tries again."""
    try:
        if path.is_symlink() or path.is_file():
            path.unlink()
        elif path.is_dir():
            shutil.rmtree(path, ignore_errors=True)  # other ranks may be at it
            if path.is_dir():
                shutil.rmtree(path)
    except OSError as error:
        logger.warning("%s could not be removed (%s); the next save beside it tries again", path, error)


# -- what dead saves leave --------------------------------------------------------------------------------------------


def tidy(target: Path) -> None:
    """Remove the hidden directories of saves that died, and give an old checkpoint its name back if it has lost it.

    Saves to other names in the same directory may be another program's, and just beginning: theirs must be a minute old.
    """
    for path, match in _hidden(target.parent):
        own = target.parent / match["name"]
        if match["kind"] == "previous" and not os.path.lexists(own):
            with contextlib.suppress(OSError):
                os.rename(path, own)
        elif (own == target or _age(path) > 60) and _is_dead(path):
            _delete(path)


def _age(path: Path) -> float:
    try:
        return time.time() - path.lstat().st_mtime
    except OSError:
        return 0.0


def _hidden(parent: Path) -> list[tuple[Path, re.Match[str]]]:
    try:
        entries = sorted(os.listdir(parent))
    except OSError:
        return []
    matches = ((parent / name, _HIDDEN.fullmatch(name)) for name in entries if name.startswith("."))
    return [(path, match) for path, match in matches if match is not None]


def _is_dead(path: Path) -> bool:
    """Whether no process holds the lock of a directory that was being written."""
    try:
        fd = os.open(path / PROBE, os.O_RDWR)
    except OSError:
        return True
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks: whoever saves to this place is the only one
        return True
    finally:
        os.close(fd)
    return True


def find(target: Path) -> Path:
    """Where the checkpoint of this name is: at the target, or where a save that died between two renames left it.

    Raises:
        CheckpointError: there is none.
    """
    if os.path.lexists(target):
        return target
    for path, match in _hidden(target.parent):
        if match["name"] == target.name and match["kind"] == "previous" and (path / MANIFEST).exists():
            return path
    raise CheckpointError(f"there is no checkpoint at {target}.")


# -- retention --------------------------------------------------------------------------------------------------------


def pattern(name: str) -> re.Pattern[str] | None:
    """What the names of a checkpoint's siblings look like: the same but for the numbers. None for a name without a number."""
    parts = re.split(r"\d+", name)
    return re.compile(r"\d+".join(map(re.escape, parts))) if len(parts) > 1 else None


def prune(target: Path, keep: int) -> list[Path]:
    """Delete the oldest siblings of a checkpoint that is whole, so that `keep` remain with it. Returns what was deleted.

    Only directories are looked at whose name is like the target's but for the numbers, and which have a manifest.
    """
    alike = pattern(target.name)
    siblings: list[tuple[float, str, Path]] = []
    for name in os.listdir(target.parent) if alike is not None else ():
        path = target.parent / name
        if alike is None or not alike.fullmatch(name) or path.is_symlink() or path == target:
            continue
        manifest: Manifest | None = None
        with contextlib.suppress(CheckpointError, OSError):
            manifest = read_manifest(path)
        if manifest is not None:
            siblings.append((manifest.saved_at, name, path))
    gone = []
    for _, _, path in sorted(siblings, reverse=True)[keep - 1 :]:
        # Half a checkpoint under its own name must not be seen, so it is hidden first.
        unseen = hidden(path, secrets.token_hex(8))
        os.rename(path, unseen)
        _delete(unseen)
        gone.append(path)
    return gone
