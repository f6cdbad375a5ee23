"""Whether a checkpoint is complete and undamaged. Not collective.

This package's own format is verified deeply: every byte has a checksum, and manifest, metadata and files have to agree. Of
others' formats every entry is read, as loading it would be, and the CRC-32 of zip archives is compared: ``torch.save`` writes
them, and so do torch's own sharded checkpoints for each entry. safetensors files have no checksums.
"""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import os
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from ...errors import CheckpointError
from ..format.atomic_directory import find
from ..format.chunks import covers
from ..format.dcp_metadata import METADATA
from ..format.fileio import some
from ..format.manifest import MANIFEST, FileRecord, Manifest, read_manifest
from ..full.open_files import is_full, kind_of, open_full
from ..sharded.checkpoint_dir import Checkpoint
from ..sharded.entries import MODEL, MODELS
from ..sharded.reader import CheckedFile
from .open_any import LIGHTNING_META, open_checkpoint, refuse_compressed

__all__ = ["Problem", "size_to_verify", "verify"]

_BLOCK = 4 << 20


@dataclass(frozen=True)
class Problem:
    """Something that is wrong.

    Attributes:
        file: its name, "" where it is none's alone.
        entries: that it concerns, as the checkpoint names them.
        text: what it is.
    """

    file: str
    entries: tuple[str, ...]
    text: str

    def __str__(self) -> str:
        return f"{self.file}: {self.text}" if self.file else self.text


def size_to_verify(path: str | os.PathLike[str]) -> int:
    """Return about how many bytes :func:`verify` will report as progress."""
    return sum(file.stat().st_size for file in _files(find(Path(os.path.abspath(os.fspath(path))))))


def _files(target: Path) -> list[Path]:
    return [file for file in target.iterdir() if file.is_file()] if target.is_dir() else [target]


def verify(path: str | os.PathLike[str], progress: Callable[[int], object] = lambda nbytes: None) -> list[Problem]:
    """Read a whole checkpoint of any format and say what is wrong with it.

    Args:
        path: of the directory or file.
        progress: is told of bytes as they are read.

    Returns:
        What is damaged or missing; nothing where the checkpoint is good.

    Raises:
        CheckpointError: there is no checkpoint at all, or a newer version's.
        OSError: it can't be read.
    """
    target = find(Path(os.path.abspath(os.fspath(path))))
    if target.is_dir() and any((target / name).exists() for name in (MANIFEST, METADATA)):
        return list(_sharded(target, progress))
    if not is_full(target) or kind_of(target) is None:
        open_checkpoint(target)  # says why it is none
    return list(_full(target, progress))


def _sharded(folder: Path, progress: Callable[[int], object]) -> Iterator[Problem]:
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        if "Upgrade" in str(error):
            raise
        yield Problem(MANIFEST, (), str(error))
        return
    damaged: set[str] = set()
    if manifest is not None:
        for name, record in manifest.files.items():
            for problem in _checksums(folder, name, record, progress):
                damaged.add(name)
                yield problem
    try:
        checkpoint = Checkpoint.open(folder, sizes=False)
    except (CheckpointError, KeyError) as error:
        if METADATA not in damaged:
            yield Problem(METADATA, (), str(error))
        return
    if manifest is not None:
        yield from _complete(checkpoint)
        yield from _as_the_manifest_says(checkpoint, manifest)
        return
    broken = list(_complete(checkpoint))
    yield from broken
    yield from _entries_of_dcp(checkpoint, {name for problem in broken for name in problem.entries}, progress)
    if (folder / LIGHTNING_META).is_file():
        yield from _full(folder / LIGHTNING_META, progress)


# -- this package's ---------------------------------------------------------------------------------------------------


def _checksums(folder: Path, name: str, record: FileRecord, progress: Callable[[int], object]) -> Iterator[Problem]:
    """Verify every block of a file, by the manifest's marks."""

    try:
        size = os.stat(folder / name).st_size
        file = CheckedFile(folder, name, record, by_crc=True)
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
        for (first, _), (last, _) in itertools.pairwise(record.marks):
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
    """Verify that metadata and manifest name the same entries at the same places, with every parameter among them."""
    metadata = checkpoint.metadata
    items = {
        (name, item.name, item.offsets): (item.start, item.length)
        for name, record in manifest.files.items()
        for item in record.items
    }
    for index, info in metadata.storage_data.items():
        is_object = checkpoint.tensor(index.fqn) is None
        offsets = None if is_object or index.offset is None else tuple(index.offset)
        if items.pop((info.relative_path, index.fqn, offsets), None) != (info.offset, info.length):
            yield Problem(info.relative_path, (index.fqn,), f"{MANIFEST} and {METADATA} disagree about {index.fqn}")
    for name, entry, _ in items:
        yield Problem(name, (entry,), f"it holds {entry}, which {METADATA} does not know")
    known = metadata.state_dict_metadata
    for row in manifest.parameters:
        prefix, _, rest = row["name"].partition(".")
        full = f"{MODEL}.{row['name']}"
        full = full if full in known else f"{MODELS}.{prefix}.{rest}"
        found = known.get(full)
        if not isinstance(found, TensorStorageMetadata):
            yield Problem("", (full,), f"parameter {row['name']} is missing")
        elif (list(found.size), str(found.properties.dtype)) != (row["shape"], f"torch.{row['dtype']}"):
            yield Problem("", (full,), f"parameter {row['name']} has another shape or dtype than {MANIFEST} says")


# -- any sharded one --------------------------------------------------------------------------------------------------


def _complete(checkpoint: Checkpoint) -> Iterator[Problem]:
    """Verify that each element of each tensor is in exactly one chunk, and each chunk in a file that is long enough."""
    storage = checkpoint.metadata.storage_data
    sizes: dict[str, int] = {}
    for name, found in checkpoint.metadata.state_dict_metadata.items():
        chunks = found.chunks if isinstance(found, TensorStorageMetadata) else []
        if isinstance(found, TensorStorageMetadata) and not covers(found.size, chunks):
            yield Problem("", (name,), f"the parts of {name} do not make up its shape {list(found.size)}")
        indices = [MetadataIndex(name, chunk.offsets) for chunk in chunks] or [MetadataIndex(name)]
        for index in indices:
            info = storage.get(index)
            if info is None:
                at = "" if index.offset is None else f" at {list(index.offset)}"
                yield Problem("", (name,), f"no file has the part of {name}{at}")
                continue
            file = info.relative_path
            if file not in sizes:
                try:
                    sizes[file] = os.stat(checkpoint.folder / file).st_size
                except OSError:
                    sizes[file] = -1
            if checkpoint.manifest is None and info.offset + info.length > sizes[file]:
                what = "is missing" if sizes[file] < 0 else f"has only {sizes[file]} bytes"
                yield Problem(file, (name,), f"it {what}, so that {name} is lost")


def _entries_of_dcp(checkpoint: Checkpoint, skip: set[str], progress: Callable[[int], object]) -> Iterator[Problem]:
    """Read entries of torch's own writer: archives with checksums, which torch does not compare when it loads."""
    for index, info in checkpoint.metadata.storage_data.items():
        if index.fqn in skip:
            continue
        with open(checkpoint.folder / info.relative_path, "rb") as raw:
            raw.seek(info.offset)
            entry = io.BytesIO(raw.read(info.length))
        progress(info.length)
        # Others may have been transformed (compressed, say): only reading them, below, shows.
        problem = None if getattr(info, "transform_descriptors", None) else _archive_problem(entry)
        if problem is not None:
            yield Problem(info.relative_path, (index.fqn,), f"{index.fqn} is damaged: {problem}")
            skip.add(index.fqn)
    for name in checkpoint.metadata.state_dict_metadata.keys() - skip:
        found = checkpoint.tensor(name)
        try:
            if found is None:
                checkpoint.read({}, [name])
            else:
                checkpoint.read({name: torch.empty(found.size, dtype=found.properties.dtype)}, ())
        except Exception as error:
            if not _refused_class(error):
                yield Problem("", (name,), _damage(error))


def _refused_class(error: BaseException) -> bool:
    """Return True if the bytes are good and hold a class that the reader does not know, which is for the reader to say."""
    text = f"{error} {error.__cause__ or ''}"
    return "could run code" in text and ("GLOBAL" in text or "Unsupported global" in text)


def _damage(error: Exception) -> str:
    """Return what reading something damaged has led to.

    Raises:
        OSError: it is the disk's own error, so that nothing is known of the data.
    """
    # A damaged archive may lead to a place that is none.
    if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
        raise error
    return str(error) or type(error).__name__


def _archive_problem(file: IO[bytes], progress: Callable[[int], object] = lambda nbytes: None) -> str | None:
    """Return what is wrong with an archive of torch.save, the first damaged member; None where all is well."""
    if file.read(2) != b"PK":
        return "it is no archive of torch.save"
    file.seek(0)
    try:
        with zipfile.ZipFile(file) as archive:
            for info in archive.infolist():
                with archive.open(info) as member:
                    while data := member.read(_BLOCK):
                        progress(len(data))
    except Exception as error:  # damage leads zipfile to errors of a dozen classes
        return _damage(error)
    return None


# -- files of one process ---------------------------------------------------------------------------------------------


def _full(path: Path, progress: Callable[[int], object]) -> Iterator[Problem]:
    """Verify a torch file, or safetensors, of which headers, sizes and the index are all that can be compared."""
    if kind_of(path) == "torch":
        refuse_compressed(path)
        with open(path, "rb") as file:
            problem = _archive_problem(file, progress)
        if problem is not None:
            yield Problem(path.name, (), f"it is damaged or was cut off at {path.stat().st_size} bytes: {problem}")
            return
    try:
        found = open_full(path)
    except CheckpointError as error:
        if not _refused_class(error):
            yield Problem("", (), str(error))
        return
    for own in found.files if found.kind == "safetensors" else ():
        with open(own, "rb") as file:
            while data := file.read(_BLOCK):
                progress(len(data))
