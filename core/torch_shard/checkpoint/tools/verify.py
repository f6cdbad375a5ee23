"""Finding out if a checkpoint is complete and undamaged. Not collective.

In this package's own format every byte has a checksum that is verified, and manifest, metadata and files have to agree. In other
formats every entry is read, as loading would read it, and the CRC-32 of zip archives is compared: ``torch.save`` writes such
archives, and so do torch's own sharded checkpoints, one for each entry. safetensors files have no checksums.
"""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from ...errors import CheckpointError
from ...utils.patterns import without_wrappers
from ..format.atomic_directory import find
from ..format.chunks import covers
from ..format.dcp_metadata import METADATA
from ..format.fileio import Progress, some
from ..format.manifest import MANIFEST, FileRecord, Manifest, read_manifest
from ..format.torch_file import verify_torch_file
from ..full.open_files import format_of, open_full
from ..sharded.checkpoint_dir import Checkpoint
from ..sharded.entries import MODEL, MODELS
from ..sharded.entry_tree import leaves, tree_of
from ..sharded.reader import CheckedFile
from .open_any import LIGHTNING_META

_BLOCK = 4 << 20


@dataclass(frozen=True)
class Problem:
    """Damage of a checkpoint.

    Attributes:
        file: the name of the damaged file; "" if the damage is not in one file alone.
        entries: the entries that are damaged, as the checkpoint names them.
        text: the description of the damage.
    """

    file: str
    entries: tuple[str, ...]
    text: str

    def __str__(self) -> str:
        return f"{self.file}: {self.text}" if self.file else self.text


def size_to_verify(path: str | os.PathLike[str]) -> int:
    """Return about how many bytes :func:`verify` will report as progress."""
    target = find(path)
    files = [file for file in target.iterdir() if file.is_file()] if target.is_dir() else [target]
    return sum(file.stat().st_size for file in files)


def verify(path: str | os.PathLike[str], progress: Progress = lambda nbytes: None) -> list[Problem]:
    """Read all of a checkpoint of any format, and return what is damaged or missing.

    Args:
        path: the directory or file.
        progress: told the bytes of each read.

    Returns:
        The problems; none if the checkpoint is good.

    Raises:
        CheckpointError: there is no checkpoint, or a newer version of this package wrote it.
        OSError: the checkpoint can't be read.
    """
    target = find(path)
    if format_of(target) != "sharded":
        return list(_full(target, progress))
    found: list[Problem] = []
    try:
        manifest = read_manifest(target)
        for name, record in manifest.files.items() if manifest is not None else ():
            found += _checksums(target, name, record, progress)
        checkpoint = Checkpoint.open(target)
    except CheckpointError as error:
        if error._is_unsupported:
            raise
        return found or [Problem("", (), str(error))]
    if manifest is not None:
        return [*found, *_as_the_manifest_says(checkpoint, manifest)]
    found += _entries_of_dcp(checkpoint, progress)
    if (target / LIGHTNING_META).is_file():
        found += _full(target / LIGHTNING_META, progress)
    return found


# -- this package's ---------------------------------------------------------------------------------------------------


def _checksums(folder: Path, name: str, record: FileRecord, progress: Progress) -> Iterator[Problem]:
    """Verify every block of a file by the manifest's checksums."""
    try:
        size = os.stat(folder / name).st_size
        file = CheckedFile(folder, name, record)
    except (CheckpointError, FileNotFoundError):
        names = record.names_in(0, record.size)
        yield Problem(name, names, f"it is missing, with {some(names)}")
        return
    if size != record.size:
        lost = record.names_in(min(size, record.size), record.size)
        yield Problem(
            name, lost, f"it has {size} bytes, and was written with {record.size}; {some(lost)} is not complete"
        )
    with contextlib.closing(file):
        for (first, _), (last, _) in itertools.pairwise(record.checksums):
            if last > size:
                break
            try:
                file.read(first, last)
            except CheckpointError:
                names = record.names_in(first, last)
                yield Problem(
                    name, names, f"bytes [{first}, {last}), which hold {some(names)}, differ from what was written"
                )
            progress(last - first)


def _as_the_manifest_says(checkpoint: Checkpoint, manifest: Manifest) -> Iterator[Problem]:
    """Verify that metadata and manifest list the same entries at the same places, and each element of a tensor once."""
    known, storage = checkpoint.metadata.state_dict_metadata, checkpoint.metadata.storage_data
    listed = {
        (file, item.name, item.offsets, item.start, item.length)
        for file, record in manifest.files.items()
        for item in record.items
    }
    stored = {
        (info.relative_path, index.fqn, _offsets(known.get(index.fqn), index), info.offset, info.length)
        for index, info in storage.items()
    }
    for file, name, *_ in sorted(listed ^ stored, key=str):
        yield Problem(file, (name,), f"{MANIFEST} and {METADATA} disagree about {name}")
    for name, found in known.items():
        if isinstance(found, TensorStorageMetadata):
            lost = any(MetadataIndex(name, chunk.offsets) not in storage for chunk in found.chunks)
            if lost or not covers(found.size, found.chunks):
                yield Problem("", (name,), f"the parts of {name} do not make up its shape {list(found.size)}")
    for row in manifest.parameters:
        name = without_wrappers(row["name"])  # version 0.1.0 kept the parts of wrappers
        prefix, _, rest = name.partition(".")
        full = f"{MODEL}.{name}"
        full = full if full in known else f"{MODELS}.{prefix}.{rest}"
        param = known.get(full)
        if not isinstance(param, TensorStorageMetadata):
            yield Problem("", (full,), f"parameter {name} is missing")
        elif (list(param.size), str(param.properties.dtype)) != (row["shape"], f"torch.{row['dtype']}"):
            yield Problem("", (full,), f"parameter {name} has another shape or dtype than {MANIFEST} says")


def _offsets(found: Any, index: MetadataIndex) -> tuple[int, ...] | None:
    """Return the offsets of a part as the manifest has them: None for an object."""
    is_tensor = isinstance(found, TensorStorageMetadata)
    return tuple(index.offset) if is_tensor and index.offset is not None else None


# -- others' sharded ones ---------------------------------------------------------------------------------------------


def _entries_of_dcp(checkpoint: Checkpoint, progress: Progress) -> Iterator[Problem]:
    """Read entries of torch's own writer, which are archives with checksums that torch does not compare when it loads."""
    places: dict[str, list[Any]] = {}
    for index, info in checkpoint.metadata.storage_data.items():
        places.setdefault(index.fqn, []).append(info)
    for _, leaf in leaves(tree_of(checkpoint)):
        where = ""
        try:
            for info in places.get(leaf.name, ()):
                where = info.relative_path
                with open(checkpoint.folder / info.relative_path, "rb") as file:
                    file.seek(info.offset)
                    entry = io.BytesIO(file.read(info.length))
                progress(info.length)
                if not getattr(info, "transform_descriptors", None):  # else it is compressed, say, and no archive
                    verify_torch_file(entry)
            where = ", ".join(leaf.files)
            leaf.read()
        except Exception as error:
            if not _refused_class(error):
                yield Problem(where, (leaf.name,), f"{leaf.name} is damaged or lost: {_damage(error)}")


def _refused_class(error: BaseException) -> bool:
    """Return True if the error is about a class that the reader does not know, which is no damage."""
    text = f"{error} {error.__cause__ or ''}"
    return "could run code" in text and ("GLOBAL" in text or "Unsupported global" in text)


def _damage(error: Exception) -> str:
    """Return the text of an error that damage has led to.

    Raises:
        OSError: the error is the disk's own, so that nothing is known about the data.
    """
    # A damaged archive may lead to a place that does not exist.
    if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL, errno.ENOENT):
        raise error
    return str(error) or type(error).__name__


# -- files of one process ---------------------------------------------------------------------------------------------


def _full(path: Path, progress: Progress) -> Iterator[Problem]:
    """Verify a torch file by its checksums, and safetensors by their headers, sizes and index."""
    kind = format_of(path)
    if kind == "torch":
        try:
            verify_torch_file(path, progress=progress)
        except Exception as error:
            text = f"it is damaged or was cut off at {path.stat().st_size} bytes: {_damage(error)}"
            yield Problem(path.name, (), text)
            return
    try:
        found = open_full(path)
    except CheckpointError as error:
        if kind is None or error._is_unsupported:
            raise
        if not _refused_class(error):
            yield Problem("", (), str(error))
        return
    for own in found.files if found.kind == "safetensors" else ():
        with open(own, "rb") as file:
            while data := file.read(_BLOCK):
                progress(len(data))
