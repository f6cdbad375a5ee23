"""A checkpoint's directory: complete or not there, whatever happens while it is made.

Everything is written into ``.<name>.saving-<nonce>`` beside the target and made durable; then the two change places in one
step, and what was at the target is deleted under the hidden name::

    step-100/                      the checkpoint of before      ->  the new one
    .step-100.saving-0123abcd/     the new one, being written    ->  the old one, being deleted

A process killed at any moment leaves the old one or the new one at the target, both complete, and a hidden directory that the
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
import stat
import time
from collections.abc import Callable
from pathlib import Path

from ...errors import CheckpointError
from ...log import logger
from .dcp_metadata import METADATA
from .fileio import naming
from .manifest import MANIFEST, Manifest, read_manifest
from .safetensors import INDEX, SINGLE, WEIGHTS

__all__ = [
    "PROBE",
    "Saving",
    "commit",
    "discard",
    "exchange",
    "find",
    "hidden",
    "pattern",
    "prune",
    "sees",
    "sync",
    "tidy",
]

PROBE = ".probe"
"""In a directory that is being written: proves that ranks see the same one, and is locked by the rank that made it."""

_HIDDEN = re.compile(r"\.(?P<name>.+)\.(?P<kind>saving|previous)-[0-9a-f]{16}")
_EXCHANGE = 2  # RENAME_EXCHANGE of renameat2(2)
_AT_FDCWD = -100
_DAY = 86400.0


class Saving:
    """A hidden directory that is being written, locked until :meth:`close`."""

    def __init__(self, path: Path, nonce: str, lock: int) -> None:
        self.path, self.nonce, self._lock = path, nonce, lock

    @classmethod
    def begin(
        cls,
        target: Path,
        nonce: str,
        refuse: Callable[[Path], None] | None = None,
        siblings: re.Pattern[str] | None = None,
    ) -> Saving:
        """Make a directory beside `target`, and its parents; remove what dead saves have left there.

        Args:
            target: where the checkpoint will be.
            nonce: sixteen hexadecimal digits, never used before.
            refuse: raises where what is at the target must not be replaced; by default where it is no checkpoint.
            siblings: names of checkpoints in the same directory that nobody else writes; see :func:`tidy`.

        Raises:
            CheckpointError: what is at the target would be lost.
            OSError: the directory can't be made.
        """
        _refuse_to_lose_the_ground(target)
        _make_parents(target.parent)
        tidy(target, siblings)  # may give an old checkpoint its name back, which then is looked at, too
        (refuse or _refuse_to_replace)(target)
        path = hidden(target, nonce)
        path.mkdir()
        lock = -1
        try:
            lock = os.open(path / PROBE, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(lock, fcntl.LOCK_EX)  # another program may look at it for a moment
            with naming(path / PROBE):
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
    """Return where a checkpoint is written."""
    return target.parent / f".{target.name}.saving-{nonce}"


def sees(path: Path, nonce: str) -> bool:
    """Return True if this process sees the directory that another one made, and not one of the same name elsewhere."""
    try:
        return (path / PROBE).read_text() == nonce
    except OSError:
        return False


def _refuse_to_lose_the_ground(target: Path) -> None:
    """Raise where the target is the working directory: the old directory is deleted in the end, with whatever runs in it."""
    with contextlib.suppress(FileNotFoundError):
        here = Path.cwd()
        if target in (here, *here.parents):
            raise CheckpointError(
                f"{target} is the working directory, or above it; a checkpoint takes the place of its directory. Give another "
                "path, for example a directory inside it."
            )


def _make_parents(folder: Path) -> None:
    """Make a directory and those above it, durably."""
    missing = [p for p in (folder, *folder.parents) if not p.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        sync(path.parent)


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
        with naming(path):
            os.fsync(fd)
    except OSError as error:
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):  # some file systems can't, and needn't
            raise
    finally:
        os.close(fd)


# -- to the target ----------------------------------------------------------------------------------------------------


def commit(saving: Saving, target: Path, take_along: Callable[[Path, Path], None] | None = None) -> None:
    """Put a durable directory in the target's place, in one step. The old one is left to :func:`discard`.

    Args:
        saving, target: what, and where.
        take_along: called with the old directory and the new one, to put into that what is to stay; by default all that is
            beside weights, in a directory that is no sharded checkpoint.

    Raises:
        OSError: nothing has changed then, or the new one is in place and only its name may not be durable.
    """
    sync(saving.path)
    if not os.path.lexists(target):
        os.rename(saving.path, target)
    else:
        (take_along or _take_along)(target, saving.path)
        _take_over(target, saving.path)
        if not exchange(saving.path, target):
            aside = _aside(target, saving.nonce)
            os.rename(target, aside)
            try:
                os.rename(saving.path, target)
            except OSError:
                os.rename(aside, target)
                raise
    sync(target.parent)
    # Not before: without it another program's save beside this one would take it for one that died.
    with contextlib.suppress(OSError):
        (target / PROBE).unlink()


def _take_along(target: Path, new: Path) -> None:
    """Move what is no part of a checkpoint, and has come while the new one was written, into that."""
    if target.is_dir() and not target.is_symlink():
        names = os.listdir(target)
        if MANIFEST not in names and METADATA not in names:
            for name in names:
                if not WEIGHTS.fullmatch(name) and not os.path.lexists(new / name):
                    os.rename(target / name, new / name)


def _take_over(target: Path, new: Path) -> None:
    """Give the new directory the old one's mode and group, which may let others in."""
    with contextlib.suppress(OSError):
        found = target.stat()
        if hasattr(os, "chown"):
            with contextlib.suppress(OSError):
                os.chown(new, -1, found.st_gid)
        os.chmod(new, stat.S_IMODE(found.st_mode))


def _aside(target: Path, nonce: str) -> Path:
    return target.parent / f".{target.name}.previous-{nonce}"


def discard(target: Path, nonce: str) -> None:
    """Delete what was at the target before a commit.

    By the process that committed and no other: another node's may still see, under the hidden name, what has been renamed.
    """
    for old in (hidden(target, nonce), _aside(target, nonce)):
        _delete(old)


def exchange(one: Path, other: Path) -> bool:
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
            shutil.rmtree(path)
    except OSError as error:
        logger.warning("%s could not be removed (%s); the next save beside it tries again", path, error)


# -- what dead saves leave --------------------------------------------------------------------------------------------


def tidy(target: Path, siblings: re.Pattern[str] | None = None) -> None:
    """Remove the hidden directories of saves that died, and give an old checkpoint its name back if it has lost it.

    Saves to other names in the same directory may be another program's, and at work on a file system whose locks are those of
    one node: what is theirs must be a day old. Not so under names that match `siblings`, of this program's own sequence: of
    these a lock that nobody holds is enough.
    """
    for path, match in _hidden(target.parent):
        own = target.parent / match["name"]
        is_sibling = siblings is not None and siblings.fullmatch(match["name"]) is not None
        if own != target and not is_sibling and _age(path) < _DAY:
            continue
        if match["kind"] == "previous" and not os.path.lexists(own):
            with contextlib.suppress(OSError):
                os.rename(path, own)
        elif _is_dead(path, unsure=own == target):
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


def _is_dead(path: Path, unsure: bool) -> bool:
    """Return True if no process holds the lock of a directory that was being written; `unsure` where that can't be told."""
    try:
        fd = os.open(path / PROBE, os.O_RDWR)
    except FileNotFoundError:
        return True
    except OSError:
        return unsure
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return unsure
    finally:
        os.close(fd)
    return True


def find(path: str | os.PathLike[str]) -> Path:
    """Return where the checkpoint of this name is: at the path, or where a save that died between two renames left it.

    Raises:
        CheckpointError: there is none.
    """
    target = Path(os.path.abspath(os.fspath(path)))
    if os.path.lexists(target):
        return target
    for path, match in _hidden(target.parent):
        complete = any((path / name).exists() for name in (MANIFEST, METADATA, SINGLE, INDEX))
        if match["name"] == target.name and match["kind"] == "previous" and complete:
            return path
    raise CheckpointError(f"there is no checkpoint at {target}.")


# -- retention --------------------------------------------------------------------------------------------------------


def pattern(name: str) -> re.Pattern[str] | None:
    """Return what the names of a checkpoint's siblings look like; None for a name without a number.

    They are the same but for the last number, since others may tell models and runs apart.
    """
    found = re.fullmatch(r"(.*?)\d+(\D*)", name, re.DOTALL)
    return re.compile(rf"{re.escape(found[1])}\d+{re.escape(found[2])}") if found is not None else None


def prune(target: Path, keep: int) -> list[Path]:
    """Delete the oldest siblings of a checkpoint that is complete, so that `keep` remain with it. Returns what was deleted.

    Only directories are looked at whose name is like the target's but for the last number, and which have a manifest.
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
