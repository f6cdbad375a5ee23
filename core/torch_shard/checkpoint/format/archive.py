"""The zip archives that ``torch.save`` writes, put together by hand: members stored as they are, aligned, checksums behind.

All sizes are known before, so a member's place is, too, and its values can be written from where they are. What torch's own
writer (miniz) does is followed to the byte, since its reader computes places where it is asked to
(``torch.utils.serialization.config.load.calculate_storage_offsets``)::

    local header, padding | content | CRC-32 and size     (not of an empty member)
    ...
    directory, end
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["ALIGNMENT", "ROOT", "Member", "end_of_archive"]

ALIGNMENT = 64
"""Bytes to which values are aligned in the file, so that they can be mapped."""

ROOT = "archive"
"""The folder that all members are in."""

_FLAGS = 0x800  # names are UTF-8
_CRC_BEHIND = 0x8  # checksum and sizes follow the values
_BIG = 0xFFFFFFFF
_DATE = (0, 33)  # 1980-01-01


@dataclass(frozen=True)
class Member:
    """One member.

    Attributes:
        name: within :data:`ROOT`.
        offset: where its local header begins, from the archive's beginning.
        size: of its content in bytes.
        crc: the content's CRC-32; :meth:`local` does not need it.
    """

    name: str
    offset: int
    size: int
    crc: int = 0

    def _path(self) -> bytes:
        return f"{ROOT}/{self.name}".encode()

    def _flags(self) -> int:
        return _FLAGS | (_CRC_BEHIND if self.size else 0)

    def _wide(self) -> bytes:
        """The extra field for numbers that 32 bits don't hold."""
        values = [value for value in (self.size, self.size, self.offset) if value >= _BIG]
        return struct.pack(f"<HH{len(values)}Q", 1, 8 * len(values), *values) if values else b""

    def local(self, aligned: bool = True) -> bytes:
        """The header before the content; `aligned` so that the content begins at a multiple of :data:`ALIGNMENT`."""
        size, path, extra = min(self.size, _BIG), self._path(), self._wide()
        if aligned:
            start = self.offset + 30 + len(path) + len(extra) + 4
            padding = -start % ALIGNMENT
            extra += struct.pack("<HH", 0x4246, padding) + b"Z" * padding
        fixed = struct.pack(
            "<4sHHHHHIIIHH", b"PK\3\4", 45, self._flags(), 0, *_DATE, 0, size, size, len(path), len(extra)
        )
        return fixed + path + extra

    def descriptor(self) -> bytes:
        """What follows the content."""
        if not self.size:
            return b""
        wide = self.size >= _BIG or self.offset >= _BIG
        return struct.pack("<4sIQQ" if wide else "<4sIII", b"PK\7\x08", self.crc, self.size, self.size)

    def entry(self) -> bytes:
        """Its line in the directory."""
        size, offset, path, extra = min(self.size, _BIG), min(self.offset, _BIG), self._path(), self._wide()
        fixed = struct.pack(
            "<4sHHHHHHIIIHH", b"PK\1\2", 45, 45, self._flags(), 0, *_DATE, self.crc, size, size, len(path), len(extra)
        )
        return fixed + struct.pack("<HHHII", 0, 0, 0, 0, offset) + path + extra


def end_of_archive(members: Sequence[Member], start: int) -> bytes:
    """The directory, which begins at `start`, and the end of the file."""
    directory = b"".join(member.entry() for member in members)
    count, size = len(members), len(directory)
    out = directory
    if start + size >= _BIG or count >= 0xFFFF:
        out += struct.pack("<4sQHHIIQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, count, count, size, start)
        out += struct.pack("<4sIQI", b"PK\6\7", 0, start + size, 1)
    few = min(count, 0xFFFF)
    return out + struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, few, few, min(size, _BIG), min(start, _BIG), 0)
