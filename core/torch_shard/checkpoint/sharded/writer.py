"""Each rank's part of a checkpoint: one file, written once from front to back, checksums taken on the way.

What DCP's FileSystemWriter writes can be read by this package and the other way round, but it passes every value through
``torch.save`` into a Python file (a copy, a checksum) and copies slices first. Here a slice goes from where it is to the file,
a few MiB at a time, so that the second look at it (the first one is the checksum's) finds it in the cache.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import io
import os
import pickle
import zlib
from pathlib import Path
from typing import Any, Protocol

import torch
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from ..format.checksum import SMALLEST, block_sum
from ..format.dcp_metadata import METADATA, StorageInfo
from ..format.fileio import naming
from ..format.manifest import FileRecord, Item
from ..format.mmap_buffer import memory_of, row_major
from ..format.tensor_entry import ALIGNMENT, surroundings

__all__ = ["DataFile", "ShardWriter", "checksum_of", "result_of", "write_tensor"]

_SMALL = 256 << 10  # bytes up to which an entry goes through the buffer
_BUFFER = 1 << 20


class Resolves(Protocol):
    """What is asked of a planner here."""

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """The tensor, or the bytes, of an item."""


class ShardWriter(StorageWriter):
    """A DCP storage writer for a directory that exists. ``record`` describes this rank's file once it is written.

    ``torch.distributed.checkpoint.save(..., storage_writer=ShardWriter(path))`` works, too, but makes no manifest.
    """

    def __init__(self, path: str | os.PathLike[str], save_id: str | None = None) -> None:
        self.path, self.save_id = Path(path), save_id
        self.name = ""
        self.record: FileRecord | None = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether it is a path of a file system."""
        return "://" not in str(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin another checkpoint."""
        if checkpoint_id is not None:
            self.path = Path(checkpoint_id)
        self.record = None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Nothing to do: the directory exists."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """As it is."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Give each rank its file's name."""
        return [dataclasses.replace(plan, storage_data=f"__{rank}_0.distcp") for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: Resolves) -> Future[list[WriteResult]]:
        """Write this rank's file and make it durable."""
        done: Future[list[WriteResult]] = Future()
        self.name, self.record = str(plan.storage_data), None
        if not plan.items:
            done.set_result([])
            return done
        path = self.path / self.name
        fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | getattr(os, "O_CLOEXEC", 0), 0o666)
        try:
            file = DataFile(fd, path)
            results = _write(file, plan, planner, self.name)
            self.record = file.finish()
            with naming(path):
                os.fsync(fd)
        finally:
            os.close(fd)
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write DCP's metadata and make it durable."""
        metadata.storage_data = {result.index: result.storage_data for part in results for result in part}
        metadata.storage_meta = self.storage_meta()
        metadata.version = "1.0.0"
        with naming(self.path / METADATA), open(self.path / METADATA, "wb") as file:
            pickle.dump(metadata, file)
            file.flush()
            os.fsync(file.fileno())

    def storage_meta(self) -> StorageMeta | None:
        """What DCP keeps with the metadata."""
        return StorageMeta(save_id=self.save_id)


def _write(file: DataFile, plan: SavePlan, planner: Resolves, name: str) -> list[WriteResult]:
    results = []
    # Tied parameters have several names and one memory: written once.
    written: dict[tuple[Any, ...], tuple[torch.Tensor, int, int, int]] = {}
    for item in plan.items:
        data = planner.resolve_data(item)
        if isinstance(data, io.BytesIO):
            assert item.type == WriteItemType.BYTE_IO
            start = file.begin()
            file.write(data.getbuffer())
            length, values = file.position - start, start
        else:
            data = data.detach().resolve_conj().resolve_neg()
            key = (data.data_ptr(), data.device, data.dtype, tuple(data.shape), data.stride())
            if data.numel() and key in written:
                _, start, length, values = written[key]
            else:
                start, length, values = write_tensor(file, data)
                written[key] = (data, start, length, values)
        offsets = None if item.index.offset is None or isinstance(data, io.BytesIO) else tuple(item.index.offset)
        file.items.append(Item(item.index.fqn, offsets, start, length, values))
        results.append(result_of(item, name, start, length))
    return results


def result_of(item: WriteItem, name: str, start: int, length: int) -> WriteResult:
    """What DCP's metadata says of an entry: in which file it is, where, how long."""
    return WriteResult(index=item.index, size_in_bytes=length, storage_data=StorageInfo(name, start, length))


def write_tensor(file: DataFile, tensor: torch.Tensor) -> tuple[int, int, int]:
    """Write one entry; return where it starts, how long it is, and where its values are."""
    head, tail = surroundings(tensor.shape, tensor.dtype)
    tensor = row_major(tensor)
    start = file.begin()
    file.write(head)
    values = file.position
    for block in memory_of(tensor):
        if tensor.nbytes <= _SMALL:
            file.write(block)
        else:
            file.write_block(block)
    file.write(tail)
    return start, file.position - start, values


class DataFile:
    """Bytes one after the other, with a running checksum and marks. `path` is for messages."""

    def __init__(self, fd: int, path: str | os.PathLike[str]) -> None:
        self.path = path
        self.fd, self.position, self.crc = fd, 0, 0
        self.marks: list[tuple[int, int]] = [(0, 0)]
        self.sums: list[str | None] = []
        self.items: list[Item] = []
        self._buffer = bytearray()
        self._written = 0

    def begin(self) -> int:
        """Begin an entry; returns where."""
        self.write(b"\0" * (-self.position % ALIGNMENT))
        self.mark()
        return self.position

    def mark(self) -> None:
        if self.marks[-1][0] != self.position:
            self.marks.append((self.position, self.crc))
            self.sums.append(None)

    def write_block(self, block: memoryview) -> None:
        """Write what is verified by itself."""
        self.mark()
        self.write(block)
        self.mark()
        if len(block) >= SMALLEST:
            self.sums[-1] = block_sum(block)

    def write(self, data: bytes | memoryview) -> None:
        self.crc = zlib.crc32(data, self.crc)
        self.position += len(data)
        if len(data) <= _SMALL:
            self._buffer += data
            if len(self._buffer) >= _BUFFER:
                self._flush()
        else:
            self._flush()
            self._write(memoryview(data))

    def _flush(self) -> None:
        if self._buffer:
            self._write(memoryview(self._buffer))
            self._buffer = bytearray()

    def _write(self, view: memoryview) -> None:
        start = self._written
        with naming(self.path):
            while view:
                count = os.write(self.fd, view)
                view, self._written = view[count:], self._written + count
        _start_writeback(self.fd, start, self._written - start)

    def finish(self) -> FileRecord:
        self._flush()
        self.mark()
        return FileRecord(self.position, self.crc, tuple(self.marks), tuple(self.items), tuple(self.sums))


def _start_writeback(fd: int, start: int, size: int) -> None:
    """Let the disk begin, instead of having all wait for the fsync: it works while the next block's checksum is taken."""
    function = _sync_file_range()
    if function is not None:
        function(fd, start, size, 2)  # SYNC_FILE_RANGE_WRITE; it is a hint, so errors are the fsync's to report


@functools.cache
def _sync_file_range() -> Any:
    try:
        function = ctypes.CDLL(None).sync_file_range  # Linux
    except (AttributeError, OSError):
        return None
    function.argtypes = [ctypes.c_int, ctypes.c_int64, ctypes.c_int64, ctypes.c_uint]
    return function


def checksum_of(path: Path) -> FileRecord:
    """The record of a small file that is there already."""
    raw = path.read_bytes()
    crc = zlib.crc32(raw)
    return FileRecord(len(raw), crc, ((0, 0), (len(raw), crc)))
