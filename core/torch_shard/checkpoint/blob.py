"""One tensor as ``torch.save`` writes it, without a copy of its values.

Torch's DCP reader gives each entry of a file to ``torch.load``, so an entry has to be a zip archive of its own: a pickle with
shape and dtype, the values (stored, not compressed) and a directory. ``torch.save`` costs a pass over the values for its
checksum and a copy through a Python buffer. Here all sizes are known before, the values are written from where they are, and
their checksum, which the archive needs, follows from the running one of the file (:func:`crc_of_part`).

::

    head: data.pkl, small members, header of data/0, padding | values | tail: checksum, small members, directory

What a tensor of some dtype looks like is taken from a small one that ``torch.save`` itself wrote, so nothing here depends on
torch's private functions.
"""

from __future__ import annotations

import collections
import functools
import io
import pickle
import struct
import zipfile
import zlib
from dataclasses import dataclass
from typing import Any

import torch

from ..layout import contiguous_stride

__all__ = ["ALIGNMENT", "Blob", "crc_of_part", "tensor_blob"]

ALIGNMENT = 64
"""Bytes to which values are aligned in the file, so that they can be mapped."""

_ROOT = "archive"
_FLAGS = 0x808  # checksum and sizes follow the values; names are UTF-8
_BIG = 0xFFFFFFFF
_DATE = (0, 33)  # 1980-01-01


@dataclass(frozen=True)
class Blob:
    """What surrounds the values of one tensor.

    Attributes:
        head: bytes before the values; the blob has to begin at a multiple of :data:`ALIGNMENT`.
        nbytes: of the values.
    """

    head: bytes
    nbytes: int
    _before: tuple[_Member, ...]
    _after: tuple[_Member, ...]
    _local: int  # where the header of data/0 is

    def tail(self, crc: int) -> bytes:
        """Bytes behind the values, given their CRC-32."""
        data = _Member("data/0", self._local, self.nbytes, crc, b"")
        out = bytearray(data.descriptor())
        at = len(self.head) + self.nbytes
        after = []
        for member in self._after:
            placed = _Member(member.name, at + len(out), member.size, member.crc, member.content)
            out += placed.local() + placed.content + placed.descriptor()
            after.append(placed)
        start = at + len(out)
        directory = b"".join(m.entry() for m in (*self._before, data, *after))
        out += directory + _end(len(self._before) + 1 + len(after), len(directory), start)
        return bytes(out)


def tensor_blob(shape: torch.Size, dtype: torch.dtype) -> Blob:
    """The surroundings of a row-major tensor's values. Not collective."""
    template = _template(dtype)
    before: list[_Member] = []
    head = bytearray()
    for name, content in (("data.pkl", template.pickle(shape)), *template.members):
        if name in ("version", ".data/serialization_id"):
            continue
        member = _Member(name, len(head), len(content), zlib.crc32(content), content)
        head += member.local() + content + member.descriptor()
        before.append(member)
    numel = shape.numel()
    data = _Member("data/0", len(head), numel * dtype.itemsize, 0, b"")
    start = len(head) + len(data.local())
    head += data.local(padding=(start // ALIGNMENT + 1) * ALIGNMENT - start)
    after = tuple(
        _Member(name, 0, len(content), zlib.crc32(content), content)
        for name, content in template.members
        if name in ("version", ".data/serialization_id")
    )
    return Blob(bytes(head), data.size, tuple(before), after, data.offset)


# -- the archive ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Member:
    name: str
    offset: int
    size: int
    crc: int
    content: bytes

    def _path(self) -> bytes:
        return f"{_ROOT}/{self.name}".encode()

    def local(self, padding: int | None = None) -> bytes:
        """The header before the content; with `padding` (at least 4) so many bytes longer, as torch's own reader expects it."""
        small = self.size < _BIG
        extra = b"" if small else struct.pack("<HHQQ", 1, 16, self.size, self.size)
        if padding is not None:
            padding += ALIGNMENT if padding < 4 else 0
            extra += struct.pack("<HH", 0x4246, padding - 4) + b"Z" * (padding - 4)
        size = self.size if small else _BIG
        path = self._path()
        fixed = struct.pack("<4sHHHHHIIIHH", b"PK\3\4", 45, _FLAGS, 0, *_DATE, 0, size, size, len(path), len(extra))
        return fixed + path + extra

    def descriptor(self) -> bytes:
        return struct.pack("<4sIII" if self.size < _BIG else "<4sIQQ", b"PK\7\x08", self.crc, self.size, self.size)

    def entry(self) -> bytes:
        wide = [value for value in (self.size, self.size, self.offset) if value >= _BIG]
        extra = struct.pack(f"<HH{len(wide)}Q", 1, 8 * len(wide), *wide) if wide else b""
        size, offset, path = min(self.size, _BIG), min(self.offset, _BIG), self._path()
        fixed = struct.pack(
            "<4sHHHHHHIIIHH", b"PK\1\2", 45, 45, _FLAGS, 0, *_DATE, self.crc, size, size, len(path), len(extra)
        )
        return fixed + struct.pack("<HHHII", 0, 0, 0, 0, offset) + path + extra


def _end(count: int, size: int, start: int) -> bytes:
    out = b""
    if start >= _BIG:
        out = struct.pack("<4sQHHIIQQQQ", b"PK\6\6", 44, 45, 45, 0, 0, count, count, size, start)
        out += struct.pack("<4sIQI", b"PK\6\7", 0, start + size, 1)
    return out + struct.pack("<4sHHHHIIH", b"PK\5\6", 0, 0, count, count, size, min(start, _BIG), 0)


# -- what torch.save writes -------------------------------------------------------------------------------------------


class _Storage:
    """Stands for a tensor's memory in a pickle."""

    def __init__(self, pid: tuple[Any, ...]) -> None:
        self.pid = pid


class _Rebuilt:
    """Stands for a tensor in a pickle: the function that makes it, and its arguments."""

    def __init__(self, function: Any, args: tuple[Any, ...]) -> None:
        self.function, self.args = function, args

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self.function, self.args


class _Reader(pickle.Unpickler):
    def persistent_load(self, pid: Any) -> Any:
        return _Storage(pid)

    def find_class(self, module: str, name: str) -> Any:
        found = super().find_class(module, name)  # torch.save wrote it a moment ago
        return functools.partial(_rebuilt, found) if name.startswith("_rebuild_tensor") else found


def _rebuilt(function: Any, *args: Any) -> _Rebuilt:
    return _Rebuilt(function, args)


class _Writer(pickle.Pickler):
    def persistent_id(self, obj: Any) -> Any:
        return obj.pid if isinstance(obj, _Storage) else None


class _Template:
    """An archive of an empty tensor, taken apart."""

    def __init__(self, dtype: torch.dtype) -> None:
        file = io.BytesIO()
        torch.save(torch.empty(0, dtype=dtype), file)
        archive = zipfile.ZipFile(file)
        contents = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
        self.tensor: _Rebuilt = _Reader(io.BytesIO(contents.pop("data.pkl"))).load()
        del contents["data/0"]
        self.members = tuple(contents.items())
        self.itemsize = dtype.itemsize

    def pickle(self, shape: torch.Size) -> bytes:
        storage, _offset, _shape, _stride, grad, _hooks, *rest = self.tensor.args
        kind, cls, key, location, _size = storage.pid
        numel = shape.numel() * (self.itemsize if cls is torch.UntypedStorage else 1)
        own = _Storage((kind, cls, key, location, numel))
        args = (own, 0, tuple(shape), contiguous_stride(shape), grad, collections.OrderedDict(), *rest)
        file = io.BytesIO()
        _Writer(file, protocol=2).dump(_Rebuilt(self.tensor.function, args))
        return file.getvalue()


@functools.lru_cache(maxsize=64)
def _template(dtype: torch.dtype) -> _Template:
    return _Template(dtype)


# -- checksums --------------------------------------------------------------------------------------------------------


def crc_of_part(before: int, both: int, length: int) -> int:
    """The CRC-32 of the last `length` bytes, given that of all before them and that of everything.

    A CRC is linear: appending `length` bytes multiplies it by x^(8*length) modulo the polynomial, and adds theirs.
    """
    return both ^ _multiply(_power(length), before)


def _multiply(a: int, b: int) -> int:
    product, bit = 0, 1 << 31
    while bit:
        if a & bit:
            product ^= b
        bit >>= 1
        b = (b >> 1) ^ 0xEDB88320 if b & 1 else b >> 1
    return product


@functools.lru_cache(maxsize=4096)
def _power(length: int) -> int:
    """x^(8*length), the lowest power in the highest bit."""
    result, square = 1 << 31, 1 << 23
    while length:
        if length & 1:
            result = _multiply(square, result)
        square = _multiply(square, square)
        length >>= 1
    return result
