"""A checkpoint's directory, which is complete or not there, even if the process dies while it is made.

Everything is written into ``.<name>.saving-<nonce>`` beside the target and made durable. Then the two directories change places
in one step, and what was at the target is deleted under the hidden name::

    step-100/                      the earlier checkpoint        ->  the new one
    .step-100.saving-0123abcd/     the new one, being written    ->  the old one, being deleted

A process that is killed at any moment leaves the old checkpoint or the new one at the target, both complete, and a hidden
directory that the next save to the same target removes. File systems that can't exchange two directories get two renames.
Between them the old checkpoint has the hidden name ``.<name>.previous-<nonce>``, under which it is found.

Nothing here is collective: one rank does this for all.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import re
import secrets
import shutil
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from ...errors import CheckpointError, ConfigError
from ...log import logger
from .dcp_metadata import METADATA
from .fileio import make_durable
from .manifest import MANIFEST, read_manifest
from .safetensors import INDEX, SINGLE, WEIGHTS

_HIDDEN = re.compile(r"\.(?P<name>.+)\.(?P<kind>saving|previous)-[0-9a-f]{16}")
_EXCHANGE = 2  # RENAME_EXCHANGE of renameat2(2)
_AT_FDCWD = -100
_DAY = 86400.0


@dataclass(frozen=True)
class Saving:
    """A hidden directory that is being written."""

    path: Path

    @classmethod
    def begin(
        cls,
        target: Path,
        nonce: str,
        refuse: Callable[[Path], None] | None = None,
        siblings: re.Pattern[str] | None = None,
    ) -> Saving:
        """Make a directory beside `target`, and its parents; remove what dead saves to the same target have left.

        Args:
            target: the path that the checkpoint will have.
            nonce: sixteen hexadecimal digits, never used before.
            refuse: a function that raises if what is at the target must not be replaced. By default only a checkpoint may.
            siblings: a pattern of names in the same directory to which no other save writes; see :func:`tidy`.

        Raises:
            CheckpointError: what is at the target would be lost.
            OSError: the directory can't be made.
        """
        _refuse_working_directory(target)
        _make_parents(target.parent)
        tidy(target, siblings)  # may give an old checkpoint its name back, which then is looked at, too
        (refuse or _refuse_to_replace)(target)
        path = hidden(target, nonce)
        path.mkdir()
        return cls(path)

    def close(self) -> None:
        """Delete the directory: an incomplete checkpoint, or, after a commit, what was at the target before."""
        _delete(self.path)


def target_of(path: str | os.PathLike[str]) -> Path:
    """Return the absolute path at which a checkpoint is to be; raise a ConfigError if it has no name."""
    target = Path(os.path.abspath(os.fsdecode(path)))
    if not target.name:
        raise ConfigError(f"path: {path!r} is no place for a checkpoint; give a file or a directory of its own.")
    return target


def hidden(target: Path, nonce: str) -> Path:
    """Return the hidden directory in which a checkpoint is written."""
    return target.parent / f".{target.name}.saving-{nonce}"


def check_shared(beside: Path, rank: int) -> None:
    """Raise if this rank does not see the hidden directory, which rank 0 has made."""
    if not beside.is_dir():
        raise CheckpointError(
            f"rank {rank} does not see {beside}, which rank 0 has just made: the ranks don't share this path. Save to a file "
            "system that all nodes mount at the same place. Nothing was saved."
        )


def _refuse_working_directory(target: Path) -> None:
    """Raise if the target is the working directory, since the old directory is deleted in the end."""
    with contextlib.suppress(FileNotFoundError):
        here = Path.cwd()
        if target in (here, *here.parents):
            raise CheckpointError(
                f"{target} is the working directory, or above it; a checkpoint takes the place of its directory. Give another "
                "path, for example a directory inside it."
            )


def _make_parents(folder: Path) -> None:
    """Make a directory and those above it, and have their names on the disk."""
    missing = [p for p in (folder, *folder.parents) if not p.exists()]
    folder.mkdir(parents=True, exist_ok=True)
    for path in missing:
        make_durable(path.parent)


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


# -- to the target ----------------------------------------------------------------------------------------------------


def commit(saving: Saving, target: Path, take_along: Callable[[Path, Path], None] | None = None) -> None:
    """Put the hidden directory in the target's place, in one step. What was there then has the hidden name.

    Args:
        saving: the hidden directory, whose files are durable.
        target: the place of the checkpoint.
        take_along: a function of the old directory and the new one, which puts into the new one what is to stay. By default that
            is everything but weights, unless the old directory is a sharded checkpoint.

    Raises:
        OSError: nothing has changed, or the new directory is in place and only its name may not be durable.
    """
    make_durable(saving.path)
    if os.path.lexists(target):
        (take_along or _take_along)(target, saving.path)
        with contextlib.suppress(OSError):  # the old one's mode may let others in
            shutil.copymode(target, saving.path)
    swap(saving.path, target)


def swap(new: Path, target: Path) -> None:
    """Put a file or directory in the target's place, in one step if the system can, and make the name durable.

    What was at the target then has the other name, unless neither is a directory.
    """
    if not os.path.lexists(target) or not (new.is_dir() or (target.is_dir() and not target.is_symlink())):
        os.replace(new, target)
    elif not exchange(new, target):
        aside = target.parent / f".{target.name}.previous-{secrets.token_hex(8)}"
        os.rename(target, aside)
        try:
            os.rename(new, target)
        except OSError:
            os.rename(aside, target)
            raise
        os.rename(aside, new)
    make_durable(target.parent)


def _take_along(target: Path, new: Path) -> None:
    """Move files that are no part of a checkpoint into the new directory: they came while it was written."""
    if target.is_dir() and not target.is_symlink():
        names = os.listdir(target)
        if MANIFEST not in names and METADATA not in names:
            for name in names:
                if not WEIGHTS.fullmatch(name) and not os.path.lexists(new / name):
                    os.rename(target / name, new / name)


def exchange(one: Path, other: Path) -> bool:
    """Exchange two names in one step; return False if the system can't."""
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
    """Delete what a hidden name leads to, or log why it can't be deleted: the next save tries again."""
    try:
        if path.is_symlink() or path.is_file():
            path.unlink()
        elif path.is_dir():
            shutil.rmtree(path)
    except OSError as error:
        logger.warning("%s could not be removed (%s); the next save beside it tries again", path, error)


# -- what dead saves leave --------------------------------------------------------------------------------------------


def tidy(target: Path, siblings: re.Pattern[str] | None = None) -> None:
    """Remove the hidden directories of dead saves to the target, and give an old checkpoint its name back if it has lost it.

    A save to another name in the same directory may be at work in another program, so its hidden directory must be a day old.
    This does not hold for names that match `siblings`, which belong to this program's own sequence.
    """
    for path, match in _hidden(target.parent):
        own = target.parent / match["name"]
        if own != target and (siblings is None or not siblings.fullmatch(match["name"])) and _age(path) < _DAY:
            continue
        if match["kind"] == "previous" and not os.path.lexists(own):
            with contextlib.suppress(OSError):
                os.rename(path, own)
        else:
            _delete(path)


def _age(path: Path) -> float:
    try:
        return time.time() - path.lstat().st_mtime
    except OSError:
        return 0.0


def _hidden(parent: Path) -> Iterator[tuple[Path, re.Match[str]]]:
    with contextlib.suppress(OSError):
        for name in sorted(os.listdir(parent)):
            match = _HIDDEN.fullmatch(name)
            if match is not None:
                yield parent / name, match


def find(path: str | os.PathLike[str]) -> Path:
    """Return where a checkpoint is: at the path, or under the hidden name that a save which died between two renames has left.

    Raises:
        CheckpointError: there is no checkpoint.
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


def sibling_pattern(name: str) -> re.Pattern[str] | None:
    """Return a pattern of the names of a checkpoint's siblings; None for a name without a number.

    Siblings' names differ in their last number alone, since other numbers may tell models and runs apart.
    """
    found = re.fullmatch(r"(.*?)\d+(\D*)", name, re.DOTALL)
    return re.compile(rf"{re.escape(found[1])}\d+{re.escape(found[2])}") if found is not None else None


def prune(target: Path, keep: int) -> None:
    """Delete the oldest siblings of a checkpoint that is complete, so that `keep` checkpoints remain with it.

    A sibling is a directory that has a manifest, and whose name matches the :func:`sibling_pattern` of the target's name.
    """
    alike = sibling_pattern(target.name)
    siblings: list[tuple[float, Path]] = []
    for path in target.parent.iterdir():
        if alike is None or not alike.fullmatch(path.name) or path.is_symlink() or path == target:
            continue
        with contextlib.suppress(CheckpointError, OSError):
            manifest = read_manifest(path)
            if manifest is not None:
                siblings.append((manifest.saved_at, path))
    for _, path in sorted(siblings, reverse=True)[keep - 1 :]:
        remove(path)


def remove(path: Path) -> None:
    """Delete a complete checkpoint, under a hidden name: a partly deleted one must not have its name.

    Raises:
        OSError: it can't be renamed, and is still complete.
    """
    unseen = hidden(path, secrets.token_hex(8))
    os.rename(path, unseen)
    _delete(unseen)
