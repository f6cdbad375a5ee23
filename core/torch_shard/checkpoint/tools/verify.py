"""Whether a checkpoint is whole and undamaged: every byte is read, one block in memory at a time. Not collective.

What can be found depends on the format. This package's has checksums of everything. Others' entries and torch files are zip
archives, with a CRC-32 of every member. safetensors has none: that its files are whole is all that can be said.
"""

from __future__ import annotations

import contextlib
import errno
import io
import itertools
import json
import lzma
import os
import re
import struct
import zipfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from ...errors import CheckpointError
from ..format.atomic_directory import find
from ..format.chunks import covers
from ..format.dcp_metadata import METADATA
from ..format.manifest import MANIFEST, FileRecord, Manifest, read_manifest
from ..full.open_files import is_full, open_full
from ..sharded.checkpoint_dir import Checkpoint
from ..sharded.entries import MODEL, MODELS
from ..sharded.reader import CheckedFile, ShardReader
from .open_any import LIGHTNING_META, leaves, open_checkpoint, refuse_compressed

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
    """Bytes that :func:`verify` will report as progress, about."""
    target = find(Path(os.path.abspath(os.fspath(path))))
    if target.is_dir():
        return sum(entry.stat().st_size for entry in os.scandir(target) if entry.is_file())
    return target.stat().st_size


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
    if target.is_dir():
        if is_full(target):
            return list(_safetensors(target, progress))
    elif target.name.endswith((".safetensors", ".index.json")):
        return list(_safetensors(target, progress))
    else:
        with open(target, "rb") as file:
            first = file.read(9)
        if first[:2] == b"PK":
            refuse_compressed(target)
            return list(_torch_file(target, progress))
        if first[8:] == b"{":  # safetensors of any name, as in a download cache
            return list(_safetensors(target, progress))
    open_checkpoint(target)  # says why it is none
    raise CheckpointError(f"{target} is no checkpoint.")


def _sharded(folder: Path, progress: Callable[[int], object]) -> Iterator[Problem]:
    try:
        manifest = read_manifest(folder)
    except CheckpointError as error:
        if "Upgrade" in str(error):
            raise
        yield Problem(MANIFEST, (), str(error))
        return
    if manifest is not None:
        for name, record in manifest.files.items():
            yield from _checksums(folder, name, record, progress)
        try:
            metadata = ShardReader(folder, manifest).read_metadata()
        except (CheckpointError, KeyError):
            return  # found above
        if getattr(metadata.storage_meta, "save_id", None) != manifest.id:
            yield Problem(METADATA, (), f"it belongs to another checkpoint than {MANIFEST}")
            return
        checkpoint = Checkpoint(folder, manifest, metadata, 0)
        yield from _complete(checkpoint)
        yield from _as_the_manifest_says(checkpoint, manifest)
        return
    try:
        checkpoint = Checkpoint.open(folder, sizes=False)
    except CheckpointError as error:
        yield Problem(METADATA, (), str(error))
        return
    broken = list(_complete(checkpoint))
    yield from broken
    yield from _entries_of_dcp(checkpoint, {name for problem in broken for name in problem.entries}, progress)
    if (folder / LIGHTNING_META).is_file():
        yield from _torch_file(folder / LIGHTNING_META, progress)


# -- this package's ---------------------------------------------------------------------------------------------------


def _checksums(folder: Path, name: str, record: FileRecord, progress: Callable[[int], object]) -> Iterator[Problem]:
    """Every block of a file, by the manifest's marks."""

    def touched(first: int, last: int) -> tuple[str, ...]:
        return tuple(dict.fromkeys(i.name for i in record.items if i.start < last and i.start + i.length > first))

    try:
        size = os.stat(folder / name).st_size
        file = CheckedFile(folder, name, record, by_crc=True)
    except (CheckpointError, FileNotFoundError):
        names = touched(0, record.size)
        yield Problem(name, names, f"it is missing, with {_some(names)}")
        return
    if size != record.size:
        lost = touched(min(size, record.size), record.size)
        yield Problem(
            name, lost, f"it has {size} bytes, and was written with {record.size}; {_some(lost)} is not whole"
        )
    with file:
        for (first, _), (last, _) in itertools.pairwise(record.marks):
            if last > size:
                break
            try:
                file.verify(first, last)
            except CheckpointError:
                names = touched(first, last)
                yield Problem(
                    name, names, f"bytes [{first}, {last}), which hold {_some(names)}, differ from what was written"
                )
            progress(last - first)


def _as_the_manifest_says(checkpoint: Checkpoint, manifest: Manifest) -> Iterator[Problem]:
    """Metadata and manifest name the same entries at the same places, and every parameter is among them."""
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
    """Every element of every tensor is in exactly one chunk, and every chunk in a file that is long enough."""
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
    """Entries of torch's own writer are archives with checksums, which torch does not compare when it loads."""
    places: dict[str, list[tuple[int, int, str, Any]]] = {}
    for index, info in checkpoint.metadata.storage_data.items():
        if index.fqn not in skip:
            places.setdefault(info.relative_path, []).append((info.offset, info.length, index.fqn, info))
    for file, entries in sorted(places.items()):
        with open(checkpoint.folder / file, "rb") as raw:
            for offset, length, name, info in sorted(entries, key=lambda entry: entry[:3]):
                part: IO[bytes] = io.BufferedReader(_Part(raw, offset, length))
                progress(length)
                if getattr(info, "transform_descriptors", None):
                    continue  # compressed, say: only reading it, below, shows
                problem = _archive_problem(part)
                if problem is not None:
                    yield Problem(file, (name,), f"{name} is damaged: {problem}")
                    skip.add(name)
    for name in checkpoint.metadata.state_dict_metadata:
        if name in skip:
            continue
        found = checkpoint.tensor(name)
        try:
            if found is None:
                checkpoint.read({}, [name])
            else:
                checkpoint.read({name: torch.empty(found.size, dtype=found.properties.dtype)}, ())
        except Exception as error:
            if not _refused_class(error):
                yield Problem("", (name,), str(error) if isinstance(error, CheckpointError) else _damage(error))


def _refused_class(error: BaseException) -> bool:
    """Whether the bytes are good and hold a class that the reader does not know, which is for the reader to say."""
    text = f"{error} {error.__cause__ or ''}"
    return "could run code" in text and ("GLOBAL" in text or "Unsupported global" in text)


def _damage(error: Exception) -> str:
    """What reading something damaged has led to.

    Raises:
        OSError: it is none, but the disk's own, so that nothing is known of the data.
    """
    # A damaged archive may lead to a place that is none.
    if isinstance(error, OSError) and error.errno not in (None, errno.EINVAL):
        raise error
    return str(error) or type(error).__name__


_DAMAGE = (
    ArithmeticError,
    EOFError,
    LookupError,
    OSError,
    RuntimeError,  # "encrypted", and NotImplementedError for what no version of zip has
    ValueError,
    lzma.LZMAError,
    struct.error,
    zipfile.BadZipFile,
    zlib.error,
)
"""What Python's zipfile raises for damaged archives."""


def _archive_problem(file: IO[bytes]) -> str | None:
    """What is wrong with an archive of torch.save."""
    if file.read(2) != b"PK":
        return "it is no archive of torch.save"
    file.seek(0)
    try:
        with zipfile.ZipFile(file) as archive:
            bad = archive.testzip()
    except _DAMAGE as error:
        return _damage(error)
    return None if bad is None else f"the checksum of {bad} differs"


class _Part(io.RawIOBase):
    """Some bytes of a file, as a file."""

    def __init__(self, file: IO[bytes], start: int, length: int) -> None:
        self._file, self._start, self._length, self._at = file, start, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self._length}[whence]
        return self._at

    def tell(self) -> int:
        return self._at

    def readinto(self, into: Any) -> int:
        count = min(len(into), max(0, self._length - self._at))
        self._file.seek(self._start + self._at)
        data = self._file.read(count)
        into[: len(data)] = data
        self._at += len(data)
        return len(data)


# -- files of one process ---------------------------------------------------------------------------------------------


def _torch_file(path: Path, progress: Callable[[int], object]) -> Iterator[Problem]:
    bad: list[zipfile.ZipInfo] = []
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.infolist()
            for member in members:
                try:
                    with archive.open(member) as file:
                        while data := file.read(_BLOCK):
                            progress(len(data))
                except _DAMAGE as error:
                    _damage(error)
                    bad.append(member)
    except _DAMAGE as error:
        text = _damage(error)
        yield Problem(path.name, (), f"it is damaged or was cut off at {path.stat().st_size} bytes: {text}")
        return
    names: dict[str, list[str]] = {}
    try:
        values = open_full(path).values
        with contextlib.suppress(RuntimeError):  # tensors without memory of their own, or what contains itself
            names = _names_by_member(values, members) if bad else {}
    except CheckpointError as error:
        if not bad and not _refused_class(error):
            yield Problem(path.name, (), str(error))
    for member in bad:
        entries = tuple(names.get(member.filename, ()))
        what = _some(entries) if entries else member.filename
        yield Problem(path.name, entries, f"the checksum of {what} differs from what was written")


def _names_by_member(values: Any, members: Sequence[zipfile.ZipInfo]) -> dict[str, list[str]]:
    """Which entries lie in which member: the file is mapped, so memories have the order of the members."""
    names: dict[int, list[str]] = {}
    for path, leaf in leaves(values):
        if isinstance(leaf, torch.Tensor) and leaf.untyped_storage().nbytes():
            names.setdefault(leaf.untyped_storage().data_ptr(), []).append(".".join(map(str, path)))
    data = sorted((m for m in members if "/data/" in m.filename and m.file_size), key=lambda m: m.header_offset)
    if len(data) != len(names):
        return {}
    return {member.filename: names[at] for member, at in zip(data, sorted(names), strict=True)}


def _safetensors(path: Path, progress: Callable[[int], object]) -> Iterator[Problem]:
    """Headers, sizes and the index, and that every byte can be read."""
    try:
        found = open_full(path)
    except CheckpointError as error:
        yield Problem("", (), str(error))
        return
    index = found.files[0] if found.files[0].name.endswith(".index.json") else None
    total = 0
    for file in found.files:
        with open(file, "rb") as raw:
            if file != index:
                length = int.from_bytes(raw.read(8), "little")
                header = json.loads(raw.read(length))
                ends = {name: own["data_offsets"] for name, own in header.items() if name != "__metadata__"}
                end = max((last for _, last in ends.values()), default=0)
                total += sum(last - first for first, last in ends.values())
                size = os.fstat(raw.fileno()).st_size
                if size != 8 + length + end:
                    yield Problem(file.name, (), f"it has {size} bytes, and its header describes {8 + length + end}")
                unknown = tuple(name for name in ends if name not in found.values or found.file_of(name) != file)
                if unknown:
                    yield Problem(file.name, unknown, f"it holds {_some(unknown)}, which the index does not say")
            raw.seek(0)
            while data := raw.read(_BLOCK):
                progress(len(data))
    if index is not None:
        yield from _index(index, [file.name for file in found.files[1:]], total)


def _index(path: Path, names: Sequence[str], total: int) -> Iterator[Problem]:
    """Whether an index has lost entries: what it says of all files together."""
    metadata = json.loads(path.read_text(encoding="utf-8")).get("metadata")
    size = metadata.get("total_size") if isinstance(metadata, dict) else None
    if isinstance(size, (int, float)) and size != total:
        yield Problem(path.name, (), f"it says that all tensors have {size} bytes, and the files have {total}")
    numbered = [match for name in names if (match := re.fullmatch(r"(.*-)(\d+)(-of-)(\d+)(\..*)", name))]
    for first, of, count, end in dict.fromkeys(match.group(1, 3, 4, 5) for match in numbered):
        every = [f"{first}{number:0{len(count)}d}{of}{count}{end}" for number in range(1, int(count) + 1)]
        lost = [name for name in every if name not in names]
        if lost:
            yield Problem(path.name, (), f"it does not name {_some(lost)}")


def _some(names: Sequence[str]) -> str:
    if not names:
        return "no entry"
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")
