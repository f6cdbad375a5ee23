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
import zipfile
import zlib
from dataclasses import dataclass
from typing import Any

import torch

from ...layout.flat_layout import contiguous_stride
from .archive import ALIGNMENT, Member, end_of_archive

__all__ = ["ALIGNMENT", "Blob", "Pickler", "Rebuilt", "Template", "crc_of_part", "template", "tensor_blob"]

_BEHIND = ("version", ".data/serialization_id")
"""Members that torch puts behind the values."""


@dataclass(frozen=True)
class Blob:
    """What surrounds the values of one tensor.

    Attributes:
        head: bytes before the values; the blob has to begin at a multiple of :data:`ALIGNMENT`.
        nbytes: of the values.
    """

    head: bytes
    nbytes: int
    _before: tuple[Member, ...]
    _after: tuple[tuple[str, bytes], ...]
    _local: int  # where the header of data/0 is

    def tail(self, crc: int) -> bytes:
        """Bytes behind the values, given their CRC-32."""
        data = Member("data/0", self._local, self.nbytes, crc)
        at = len(self.head) + self.nbytes
        out = bytearray(data.descriptor())
        members = [*self._before, data]
        for name, content in self._after:
            member = Member(name, at + len(out), len(content), zlib.crc32(content))
            out += member.local(aligned=False) + content + member.descriptor()
            members.append(member)
        return bytes(out + end_of_archive(members, at + len(out)))


def tensor_blob(shape: torch.Size, dtype: torch.dtype) -> Blob:
    """The surroundings of a row-major tensor's values. Not collective."""
    kind = template(dtype)
    before: list[Member] = []
    head = bytearray()
    for name, content in (("data.pkl", kind.pickle(shape)), *kind.members_before):
        member = Member(name, len(head), len(content), zlib.crc32(content))
        head += member.local(aligned=False) + content + member.descriptor()
        before.append(member)
    data = Member("data/0", len(head), shape.numel() * dtype.itemsize)
    head += data.local()
    return Blob(bytes(head), data.size, tuple(before), kind.members_behind, data.offset)


# -- what torch.save writes -------------------------------------------------------------------------------------------


class _Storage:
    """Stands for a tensor's memory in a pickle."""

    def __init__(self, pid: tuple[Any, ...]) -> None:
        self.pid = pid


class Rebuilt:
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


def _rebuilt(function: Any, *args: Any) -> Rebuilt:
    return Rebuilt(function, args)


class Pickler(pickle.Pickler):
    """Writes what :class:`Rebuilt` stands for."""

    def persistent_id(self, obj: Any) -> Any:
        return obj.pid if isinstance(obj, _Storage) else None


class Template:
    """An archive of an empty tensor of some dtype, taken apart.

    Attributes:
        members_before, members_behind: names and contents of the small members before and behind the values.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        file = io.BytesIO()
        torch.save(torch.empty(0, dtype=dtype), file)
        archive = zipfile.ZipFile(file)
        contents = {name.partition("/")[2]: archive.read(name) for name in archive.namelist()}
        self.tensor: Rebuilt = _Reader(io.BytesIO(contents.pop("data.pkl"))).load()
        del contents["data/0"]
        self.members_before = tuple(item for item in contents.items() if item[0] not in _BEHIND)
        self.members_behind = tuple(item for item in contents.items() if item[0] in _BEHIND)
        self.itemsize = dtype.itemsize

    def rebuilt(self, shape: torch.Size, key: str = "0", repeated: bool = False) -> Rebuilt:
        """A row-major tensor in a pickle whose values are the member ``data/<key>``; `repeated`: that has only one."""
        storage, _offset, _shape, _stride, grad, _hooks, *rest = self.tensor.args
        kind, cls, _key, location, _size = storage.pid
        numel = (1 if repeated else shape.numel()) * (self.itemsize if cls is torch.UntypedStorage else 1)
        own = _Storage((kind, cls, key, location, numel))
        stride = (0,) * len(shape) if repeated else contiguous_stride(shape)
        args = (own, 0, tuple(shape), stride, grad, collections.OrderedDict(), *rest)
        return Rebuilt(self.tensor.function, args)

    def pickle(self, shape: torch.Size) -> bytes:
        """The pickle of an archive that holds only that tensor."""
        file = io.BytesIO()
        Pickler(file, protocol=2).dump(self.rebuilt(shape))
        return file.getvalue()


@functools.lru_cache(maxsize=64)
def template(dtype: torch.dtype) -> Template:
    return Template(dtype)


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
