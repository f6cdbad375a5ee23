"""Checkpoints as files and folders. A new checkpoint takes the place of an older one only when it is complete."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from torch_shard.frontend.checkpoint import hidden, swap, tidy
from torch_shard.log import logger

from .._private import MixinBase

_MARKERS = (".metadata", "manifest.json", "meta.pt")
"""A folder with a sharded checkpoint has at least one of these files, whichever program wrote it."""


def is_local(path: Any) -> bool:
    """Return True for a path of a file system, False for a URL."""
    return "://" not in str(path)


def _is_checkpoint_folder(path: Path) -> bool:
    """Return True for a folder that holds a sharded checkpoint."""
    return any((path / marker).is_file() for marker in _MARKERS)


def _refuse_other_folder(target: Path) -> None:
    """Raise IsADirectoryError for a folder that is no checkpoint and would be lost."""
    if target.is_dir() and not target.is_symlink() and not _is_checkpoint_folder(target):
        raise IsADirectoryError(f"{target} is a folder, and not a checkpoint; the checkpoint needs another path.")


class FileMixin(MixinBase):  # type: ignore[misc]
    """A ``TorchCheckpointIO`` that writes beside the target and then exchanges the two.

    Lightning's own writes in place where the folder for temporary files is on another disk. A process that is killed
    then leaves half a checkpoint, and a process that has mapped the older file would read the new bytes, or none.
    """

    written = 0
    """How many files are complete. A plugin around this one may write them in the background."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """Write one file, durable when this returns."""
        if storage_options is not None or not is_local(path):
            super().save_checkpoint(checkpoint, path, storage_options=storage_options)
        else:
            self._write(checkpoint, path)
        self.written += 1

    def _write(self, checkpoint: dict[str, Any], path: Any) -> None:
        target = Path(os.path.abspath(path))
        _refuse_other_folder(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        tidy(target)
        beside = hidden(target, secrets.token_hex(8))
        try:
            with open(beside, "wb") as file:
                torch.save(checkpoint, file)
                file.flush()
                os.fsync(file.fileno())
            swap(beside, target)
        finally:
            with contextlib.suppress(OSError):
                delete(beside)

    def remove_checkpoint(self, path: Any) -> None:
        """Delete a file, a folder, or a link."""
        if is_local(path):
            remove(Path(os.path.abspath(path)))
        else:
            super().remove_checkpoint(path)


def delete(path: Path) -> None:
    """Delete a file, a link (not what it leads to) or a folder, if it is there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def remove(path: Path) -> None:
    """Delete a checkpoint. No part of it is ever seen under its name."""
    if path.is_dir() and not path.is_symlink():
        if not _is_checkpoint_folder(path):
            logger.warning("%s is left alone: it is a folder, and holds no checkpoint", path)
            return
        unseen = hidden(path, secrets.token_hex(8))
        os.rename(path, unseen)
        path = unseen
    delete(path)


@contextlib.contextmanager
def aside(path: Any) -> Iterator[None]:
    """Give a folder at `path` a hidden name while a user's own plugin writes a file there.

    The folder gets its name back if the plugin fails. It stays hidden if no file is there afterwards, because the plugin
    writes in the background; the next save in that directory deletes it.
    """
    target = Path(os.path.abspath(path)) if is_local(path) else None
    if target is None or not target.is_dir() or target.is_symlink():
        yield
        return
    _refuse_other_folder(target)
    kept = target.parent / f".{target.name}.previous-{secrets.token_hex(8)}"
    os.rename(target, kept)
    try:
        yield
    except BaseException:
        if not os.path.lexists(target):
            os.rename(kept, target)
        raise
    if os.path.lexists(target):
        delete(kept)
