"""Writing a rank's part of a checkpoint: one file, from front to back, with checksums taken on the way.

DCP's FileSystemWriter writes the same format, but copies shards and passes every value through ``torch.save`` into a Python
file (a copy, a checksum). Here a shard goes from where it is to the file, a few MiB at a time, so that the write finds in the
cache what the checksum has read.
"""

from __future__ import annotations

import dataclasses
import io
import os
import pickle
import zlib
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from ...utils.tensor_memory import memory_key
from ..format.checksum import SMALLEST, block_sum
from ..format.dcp_metadata import METADATA, StorageInfo
from ..format.fileio import naming, write_durable
from ..format.manifest import MANIFEST, FileRecord, ItemRecord, Manifest
from ..format.mmap_buffer import blocks_of, row_major
from ..format.tensor_entry import ALIGNMENT, surroundings

_Resolve = Callable[[WriteItem], Any]

_SMALL = 256 << 10  # bytes of an entry up to which its values are no blocks of their own
_BUFFER = 1 << 20  # bytes; what is larger goes past the buffer


@dataclasses.dataclass(frozen=True)
class Deferred:
    """A tensor that is read when it is its turn to be written.

    Attributes:
        key: equal for two names of one memory, which is written once.
        read: a function that returns the tensor.
    """

    key: Hashable
    read: Callable[[], torch.Tensor]


def write_file(folder: Path, plan: SavePlan, resolve: _Resolve) -> tuple[FileRecord | None, list[WriteResult]]:
    """Write a rank's file, whose name is in the plan, and make it durable. `resolve` returns an item's tensor or bytes.

    Returns:
        What the manifest says of the file, None where there is nothing to write; and what DCP's metadata says of the entries.
    """
    if not plan.items:
        return None, []
    name = str(plan.storage_data)
    with naming(folder / name), open(folder / name, "wb", buffering=_BUFFER) as raw:
        file = _DataFile(raw)
        results = _write(file, plan, resolve, name)
        record = file.finish()
        raw.flush()
        os.fsync(raw.fileno())
    return record, results


def write_metadata(
    folder: Path, metadata: Metadata, results: Sequence[Sequence[WriteResult]], save_id: str
) -> FileRecord:
    """Write DCP's metadata with the places in all ranks' files, make it durable, and return what the manifest says of it."""
    metadata.storage_data = {result.index: result.storage_data for part in results for result in part}
    metadata.storage_meta = StorageMeta(save_id=save_id)
    metadata.version = "1.0.0"
    raw = pickle.dumps(metadata)
    write_durable(folder / METADATA, raw)
    crc = zlib.crc32(raw)
    return FileRecord(len(raw), crc, ((0, 0), (len(raw), crc)))


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """Write the manifest, which makes a checkpoint of the directory, and make it durable."""
    write_durable(folder / MANIFEST, manifest.to_text().encode())


def _write(file: _DataFile, plan: SavePlan, resolve: _Resolve, name: str) -> list[WriteResult]:
    results = []
    # Tied parameters have several names and one memory: written once. Kept, so that no other memory gets the same key.
    written: dict[Hashable, tuple[Any, tuple[int, int, int]]] = {}
    for item in plan.items:
        data = resolve(item)
        if isinstance(data, io.BytesIO):
            start = file.begin()
            file.write(data.getbuffer())
            length, values = file.position - start, start
        else:
            key = data.key if isinstance(data, Deferred) else memory_key(data) if data.numel() else object()
            if key not in written:
                written[key] = data, _write_tensor(file, data.read() if isinstance(data, Deferred) else data)
            start, length, values = written[key][1]
        offsets = None if item.index.offset is None or isinstance(data, io.BytesIO) else tuple(item.index.offset)
        file.items.append(ItemRecord(item.index.fqn, offsets, start, length, values))
        info = StorageInfo(name, start, length)
        results.append(WriteResult(index=item.index, size_in_bytes=length, storage_data=info))
    return results


def _write_tensor(file: _DataFile, tensor: torch.Tensor) -> tuple[int, int, int]:
    """Write one entry; return where it starts, how long it is, and where its values are."""
    head, tail = surroundings(tensor.shape, tensor.dtype)
    tensor = row_major(tensor)
    start = file.begin()
    file.write(head)
    values = file.position
    for block in blocks_of(tensor):
        if tensor.nbytes <= _SMALL:
            file.write(block)
        else:
            file.write_block(block)
    file.write(tail)
    return start, file.position - start, values


class _DataFile:
    """A file that is written from front to back, with its running checksum and the checksums and items of its record."""

    def __init__(self, file: BinaryIO) -> None:
        self.position, self.crc = 0, 0
        self.checksums: list[tuple[int, int]] = [(0, 0)]
        self.sums: list[str | None] = []
        self.items: list[ItemRecord] = []
        self._file = file

    def begin(self) -> int:
        """Begin an entry; return where it starts."""
        self.write(b"\0" * (-self.position % ALIGNMENT))
        self.note_checksum()
        return self.position

    def note_checksum(self) -> None:
        """End a block here."""
        if self.checksums[-1][0] != self.position:
            self.checksums.append((self.position, self.crc))
            self.sums.append(None)

    def write_block(self, block: memoryview) -> None:
        """Write bytes that are verified by themselves."""
        self.note_checksum()
        self.write(block)
        self.note_checksum()
        if len(block) >= SMALLEST:
            self.sums[-1] = block_sum(block)
        if hasattr(os, "posix_fadvise"):  # the disk begins to write while the next block's checksum is taken
            os.posix_fadvise(self._file.fileno(), self.position - len(block), len(block), os.POSIX_FADV_DONTNEED)

    def write(self, data: bytes | memoryview) -> None:
        """Write bytes, and go on with the checksum."""
        self.crc = zlib.crc32(data, self.crc)
        self.position += len(data)
        self._file.write(data)

    def finish(self) -> FileRecord:
        """Return what the manifest says of the file."""
        self.note_checksum()
        return FileRecord(self.position, self.crc, tuple(self.checksums), tuple(self.items), tuple(self.sums))
