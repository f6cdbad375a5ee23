"""Reading the files of a checkpoint that has a manifest: each byte that is used has been verified, and no others are read.

A rank that needs a part of an entry reads the blocks that hold this part (4 MiB each). A large block has a checksum of its own;
for other blocks the file's running CRC-32 is continued from the checksum before them.
"""

from __future__ import annotations

import bisect
import contextlib
import io
import os
import weakref
import zlib
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlanner, ReadItem

from ...errors import CheckpointError
from ...layout.flat_layout import contiguous_stride
from ..format.checksum import block_sum
from ..format.dcp_metadata import METADATA
from ..format.fileio import some
from ..format.manifest import MANIFEST, FileRecord, ItemRecord, Manifest
from ..format.mmap_buffer import bytes_of


class CheckedFile:
    """One file of a checkpoint, of which :meth:`read` gives only bytes that are as they were written."""

    def __init__(self, folder: Path, name: str, record: FileRecord) -> None:
        self.folder, self.name, self.record = folder, name, record
        self._positions = [position for position, _ in record.checksums]
        self._scratch = bytearray()
        try:
            self._fd = os.open(folder / name, os.O_RDONLY)
        except FileNotFoundError as error:
            held = some(record.names_in(0, record.size), METADATA)
            raise CheckpointError(
                f"{folder / name} is missing, with {held}, so nothing was loaded. Load an earlier checkpoint."
            ) from error
        self.close = weakref.finalize(self, os.close, self._fd)
        if hasattr(os, "posix_fadvise"):  # the disk reads ahead while a block is verified
            os.posix_fadvise(self._fd, 0, 0, os.POSIX_FADV_SEQUENTIAL)

    def read(self, start: int, stop: int, into: memoryview | None = None) -> None:
        """Fill `into` with bytes ``[start, stop)``; without it verify the blocks that hold them.

        Raises:
            CheckpointError: one of these blocks is not as it was written; names the entries in it.
        """
        for i, first, last in self._blocks(start, stop):
            low, high = max(start, first), min(stop, last)
            is_whole = into is not None and high - low == last - first
            block = into[: high - low] if into is not None and is_whole else self._memory(last - first)
            self._fill(block, first)
            self._check(i, block)
            if into is not None:
                if not is_whole:
                    into[: high - low] = block[low - first : high - first]
                into = into[high - low :]

    def _blocks(self, start: int, stop: int) -> Iterator[tuple[int, int, int]]:
        """Yield the number and the bounds of each block that holds some of the bytes."""
        checksums = self.record.checksums
        i = bisect.bisect_right(self._positions, start) - 1
        while start < stop:
            first, start = checksums[i][0], checksums[i + 1][0]
            yield i, first, start
            i += 1

    def _check(self, i: int, block: memoryview) -> None:
        (first, crc), (last, expected) = self.record.checksums[i : i + 2]
        known = self.record.sums[i] if self.record.sums else None
        found = None if known is None else block_sum(block)
        good = zlib.crc32(block, crc) == expected if found is None else found == known
        if not good:
            raise self._damaged(first, last)

    def _memory(self, size: int) -> memoryview:
        # Kept for the next block: new memory costs more than the checksum.
        if len(self._scratch) < size:
            self._scratch = bytearray(size)
        return memoryview(self._scratch)[:size]

    def _fill(self, block: memoryview, at: int) -> None:
        while block:
            count = os.preadv(self._fd, [block], at)
            if not count:
                raise self._damaged(at, at + len(block))
            block, at = block[count:], at + count

    def _damaged(self, first: int, last: int) -> CheckpointError:
        what = ", ".join(self.record.names_in(first, last)) or "no parameter"
        return CheckpointError(
            f"{self.folder / self.name} is damaged: bytes [{first}, {last}), which hold {what}, are missing or differ from what "
            "was written (checksum). Nothing was loaded. Load an earlier checkpoint."
        )


def read_items(
    folder: Path, manifest: Manifest, metadata: Metadata, items: Iterable[ReadItem], planner: LoadPlanner | None
) -> None:
    """Read items into the planner's tensors; without a planner verify all bytes that would be read. Not collective.

    Raises:
        CheckpointError: something is damaged or missing.
    """
    wanted: dict[str, list[tuple[ItemRecord, ReadItem]]] = {}
    for read in items:
        index = read.storage_index
        info = metadata.storage_data.get(index)
        record = None if info is None else manifest.files.get(info.relative_path)
        offsets = None if read.type == LoadItemType.BYTE_IO or index.offset is None else tuple(index.offset)
        item = None if record is None else record.places.get((index.fqn, offsets))
        if info is None or item is None:
            raise CheckpointError(
                f"{folder}: {index.fqn} is not complete: {METADATA} and {MANIFEST} don't agree on a file that has its part at "
                f"{index.offset}. Use another checkpoint."
            )
        wanted.setdefault(info.relative_path, []).append((item, read))
    # One file after the other, and each from front to back.
    for name, found in sorted(wanted.items()):
        with contextlib.closing(CheckedFile(folder, name, manifest.files[name])) as file:
            for item, read in sorted(found, key=lambda pair: pair[0].start):
                _read(file, item, read, metadata, planner)


def _read(file: CheckedFile, item: ItemRecord, read: ReadItem, metadata: Metadata, planner: LoadPlanner | None) -> None:
    entry = metadata.state_dict_metadata[read.storage_index.fqn]
    if not isinstance(entry, TensorStorageMetadata):
        raw = bytearray(item.length)
        file.read(item.start, item.start + item.length, memoryview(raw))
        if planner is not None:
            planner.load_bytes(read, io.BytesIO(raw))
        return
    # The values of a saved chunk lie row by row.
    shape, dtype = entry.chunks[read.storage_index.index or 0].sizes, entry.properties.dtype
    strides = contiguous_stride(shape)
    lengths = tuple(read.lengths)[: len(shape)]  # of a 0-dim tensor DCP may give one length
    first = sum(offset * stride for offset, stride in zip(read.storage_offsets, strides, strict=False))
    span = sum((length - 1) * stride for length, stride in zip(lengths, strides, strict=True)) + 1
    if not all(lengths):
        return
    start = item.values + first * dtype.itemsize
    stop = start + span * dtype.itemsize
    if planner is None:
        file.read(start, stop)
        return
    target = planner.resolve_tensor(read).detach()
    if (
        target.dtype == dtype
        and target.device.type == "cpu"
        and target.is_contiguous()
        and stop - start == target.nbytes
    ):
        file.read(start, stop, bytes_of(target))
    else:
        values = torch.empty(span, dtype=dtype, device="cpu")
        file.read(start, stop, bytes_of(values))
        target.copy_(values.as_strided(lengths, strides))
    planner.commit_tensor(read, target)
