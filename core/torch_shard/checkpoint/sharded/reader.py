"""Reading a checkpoint of this package: every byte that is used has been verified, and no others are read.

A rank that needs a part of an entry reads the blocks that hold it (4 MiB each). A large one has a checksum of its own, of
others the file's running CRC-32 is continued from the mark before them. What was verified ahead (:meth:`CheckedFile.verify`) is
compared with a sum that is faster still when it is read.
"""

from __future__ import annotations

import bisect
import contextlib
import ctypes
import io
import math
import os
import weakref
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, ReadItem

from ...errors import CheckpointError
from ...layout.flat_layout import contiguous_stride
from ..format.checksum import block_sum, word_sum
from ..format.dcp_metadata import METADATA, load_metadata
from ..format.fileio import some
from ..format.manifest import FileRecord, Item, Manifest

__all__ = ["CheckedFile", "Receives", "ShardReader", "check_sizes"]

_OPEN = 128  # files that are kept open, of which a checkpoint has one for each rank that wrote it


class Receives(Protocol):
    """What reading asks of a planner: the part of DCP's ``LoadPlanner`` that takes values."""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Take an object's bytes."""

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Return the memory that an item's values go to."""

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Take note that the values are there."""


def check_sizes(folder: Path, manifest: Manifest) -> None:
    """Raise for files that are missing or have another size than they were written with. Not collective."""
    problems = []
    for name, record in manifest.files.items():
        try:
            size = os.stat(folder / name).st_size
        except FileNotFoundError:
            problems.append(f"{name} is missing, with {_contents(record)}")
            continue
        if size != record.size:
            cut = record.item_at(size) if size < record.size else None
            where = f", so that {cut.name} and what follows it are lost" if cut is not None else ""
            problems.append(f"{name} has {size} bytes, and was written with {record.size}{where}")
    if problems:
        raise CheckpointError(
            f"{folder} is damaged, so nothing was loaded: {'; '.join(problems)}. Load an earlier checkpoint."
        )


def _contents(record: FileRecord) -> str:
    return some(record.names_in(0, record.size), "DCP's metadata")


class CheckedFile:
    """One file of a checkpoint. What :meth:`read` has given is what was written. With `by_crc` only CRCs are compared."""

    def __init__(self, folder: Path, name: str, record: FileRecord, by_crc: bool = False) -> None:
        self.folder, self.name, self.record, self._by_crc = folder, name, record, by_crc
        self._positions = [position for position, _ in record.marks]
        self._sums: dict[tuple[int, int], int] = {}  # of what was verified ahead
        self._buffer = bytearray()
        try:
            self._fd = os.open(folder / name, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        except FileNotFoundError as error:
            raise CheckpointError(
                f"{folder / name} is missing, with {_contents(record)}, so nothing was loaded. Load an earlier checkpoint."
            ) from error
        self._closer = weakref.finalize(self, os.close, self._fd)
        if hasattr(os, "posix_fadvise"):  # the disk reads ahead while a block is verified
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)

    def close(self) -> None:
        """Let go of the file."""
        self._closer()

    def read(self, start: int, stop: int, into: memoryview) -> None:
        """Fill `into` with bytes ``[start, stop)``.

        Raises:
            CheckpointError: a block that holds some of them is not as it was written; names what lies there.
        """
        for i, first, last in self._blocks(start, stop):
            low, high = max(start, first), min(stop, last)
            part = into[: high - low]
            known = self._sums.get((low, high))
            if known is not None:
                self._fill(part, low)
                if word_sum(part) != known:
                    raise self._damaged(low, high)
            elif high - low == last - first:
                self._fill(part, first)
                self._check(i, part)
            else:
                block = self._scratch(last - first)
                self._fill(block, first)
                self._check(i, block)
                part[:] = block[low - first : high - first]
            into = into[high - low :]

    def verify(self, start: int, stop: int) -> None:
        """Look at the blocks that hold bytes ``[start, stop)``, for a later :meth:`read` of just these.

        Raises:
            CheckpointError: one of them is not as it was written; names what lies there.
        """
        for i, first, last in self._blocks(start, stop):
            low, high = max(start, first), min(stop, last)
            block = self._scratch(last - first)
            self._fill(block, first)
            self._check(i, block)
            self._sums[low, high] = word_sum(block[low - first : high - first])

    def _blocks(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield number and bounds of each block that holds some of the bytes."""
        marks = self.record.marks
        i = bisect.bisect_right(self._positions, start) - 1
        while start < stop:
            first, start = marks[i][0], marks[i + 1][0]
            yield i, first, start
            i += 1

    def _check(self, i: int, block: memoryview) -> None:
        (first, crc), (last, expected) = self.record.marks[i : i + 2]
        known = None if self._by_crc else self.record.sum_of(i)
        found = None if known is None else block_sum(block)
        good = zlib.crc32(block, crc) == expected if found is None else found == known
        if not good:
            raise self._damaged(first, last)

    def _scratch(self, size: int) -> memoryview:
        # Kept: new memory costs more than the checksum.
        if len(self._buffer) < size:
            self._buffer = bytearray(size)
        return memoryview(self._buffer)[:size]

    def _fill(self, block: memoryview, at: int) -> None:
        while block:
            count = os.preadv(self._fd, [block], at)
            if not count:
                raise self._damaged(at, at + len(block))
            block, at = block[count:], at + count

    def _damaged(self, first: int, last: int) -> CheckpointError:
        what = ", ".join(self.record.names_in(first, last)) or "no parameter"
        return CheckpointError(
            f"{self.folder / self.name} is damaged: bytes [{first}, {last}), which hold {what}, differ from what was written "
            "(checksum). Nothing was loaded. Load an earlier checkpoint."
        )


class ShardReader:
    """Reads entries of a checkpoint with a manifest, each verified; files stay open until :meth:`close`.

    Attributes:
        metadata: DCP's, verified and unpickled with its own classes only.
    """

    def __init__(self, folder: Path, manifest: Manifest) -> None:
        self.folder, self.manifest = folder, manifest
        self._files: dict[str, CheckedFile] = {}
        self._tables: dict[str, dict[tuple[str, tuple[int, ...] | None], Item]] = {}
        record = manifest.files[METADATA]
        raw = bytearray(record.size)
        with contextlib.closing(CheckedFile(folder, METADATA, record)) as file:
            file.read(0, record.size, memoryview(raw))
        self.metadata = load_metadata(io.BytesIO(raw), str(folder / METADATA))

    def read(self, items: Sequence[ReadItem], planner: Receives) -> None:
        """Read items into the planner's tensors, one file after the other and each from front to back."""
        for file, item, read in self._places(items):
            self._read(file, item, read, planner)

    def verify(self, items: Sequence[ReadItem]) -> None:
        """Look at all bytes that :meth:`read` would read, which then need no second look.

        Raises:
            CheckpointError: something is damaged or missing.
        """
        for file, item, read in self._places(items):
            if read.type == LoadItemType.BYTE_IO:
                file.verify(item.start, item.start + item.length)
            else:
                file.verify(*_box(item, *self._chunk(read.storage_index), read)[:2])

    def close(self) -> None:
        """Let go of the files."""
        for file in self._files.values():
            file.close()
        self._files.clear()

    def _places(self, items: Sequence[ReadItem]) -> Iterator[tuple[CheckedFile, Item, ReadItem]]:
        wanted: dict[str, list[tuple[int, int]]] = {}
        for number, read in enumerate(items):
            info = self.metadata.storage_data.get(read.storage_index)
            if info is None:
                index = read.storage_index
                raise CheckpointError(
                    f"{self.folder}: {index.fqn} is not complete: no file has its part at {index.offset}. Use another checkpoint."
                )
            wanted.setdefault(info.relative_path, []).append((info.offset, number))
        for name, numbers in sorted(wanted.items()):
            file = self._file(name)
            for _, number in sorted(numbers):
                yield file, self._item(file, items[number]), items[number]
            if len(self._files) > _OPEN:
                self._files.pop(name).close()

    def _file(self, name: str) -> CheckedFile:
        record = self.manifest.files.get(name)
        if record is None:
            raise CheckpointError(f"{self.folder}: the manifest has no file {name}, which the metadata names.")
        if name not in self._files:
            self._files[name] = CheckedFile(self.folder, name, record)
        return self._files[name]

    def _item(self, file: CheckedFile, read: ReadItem) -> Item:
        if file.name not in self._tables:
            self._tables[file.name] = {(item.name, item.offsets): item for item in file.record.items}
        index = read.storage_index
        is_object = read.type == LoadItemType.BYTE_IO
        item = self._tables[file.name].get(
            (index.fqn, None if is_object or index.offset is None else tuple(index.offset))
        )
        if item is None:
            raise CheckpointError(
                f"{file.folder / file.name}: the manifest has no {index.fqn} there, but the metadata has."
            )
        return item

    def _read(self, file: CheckedFile, item: Item, read: ReadItem, planner: Receives) -> None:
        if read.type == LoadItemType.BYTE_IO:
            raw = bytearray(item.length)
            file.read(item.start, item.start + item.length, memoryview(raw))
            planner.load_bytes(read, io.BytesIO(raw))
            return
        target = planner.resolve_tensor(read).detach()
        shape, dtype = self._chunk(read.storage_index)
        _read_tensor(file, item, shape, dtype, read, target)
        planner.commit_tensor(read, target)

    def _chunk(self, index: MetadataIndex) -> tuple[torch.Size, torch.dtype]:
        found = self.metadata.state_dict_metadata[index.fqn]
        assert isinstance(found, TensorStorageMetadata)
        chunks = found.chunks
        if index.index is not None and index.index < len(chunks) and chunks[index.index].offsets == index.offset:
            return chunks[index.index].sizes, found.properties.dtype
        return next(chunk.sizes for chunk in chunks if chunk.offsets == index.offset), found.properties.dtype


def _read_tensor(
    file: CheckedFile, item: Item, shape: torch.Size, dtype: torch.dtype, read: ReadItem, target: torch.Tensor
) -> None:
    """Copy a box of a saved chunk, whose values lie row by row, to `target`."""
    start, stop, lengths, strides = _box(item, shape, dtype, read)
    size = stop - start
    if not size:
        return
    if target.dtype == dtype and target.device.type == "cpu" and target.is_contiguous() and size == target.nbytes:
        with _memory(target, size) as view:
            file.read(start, stop, view)
        return
    raw = torch.empty(size, dtype=torch.uint8)
    with _memory(raw, size) as view:
        file.read(start, stop, view)
    target.copy_(raw.view(dtype).as_strided(lengths, strides).view(target.shape))


def _box(
    item: Item, shape: torch.Size, dtype: torch.dtype, read: ReadItem
) -> tuple[int, int, tuple[int, ...], tuple[int, ...]]:
    """Return where in the file a box of a chunk begins and ends, and the shape and strides of its values there."""
    lengths = tuple(read.lengths) if shape else ()  # of a 0-dim tensor DCP may give one length
    strides = contiguous_stride(shape)
    first = sum(offset * stride for offset, stride in zip(read.storage_offsets, strides, strict=False)) if shape else 0
    span = sum((length - 1) * stride for length, stride in zip(lengths, strides, strict=True)) + 1
    if not math.prod(lengths):
        first = span = 0
    start = item.values + first * dtype.itemsize
    return start, start + span * dtype.itemsize, lengths, strides


@contextlib.contextmanager
def _memory(tensor: torch.Tensor, size: int) -> Iterator[memoryview]:
    """Return a tensor's bytes, to be written to."""
    yield memoryview((ctypes.c_char * size).from_address(tensor.data_ptr())).cast("B")
