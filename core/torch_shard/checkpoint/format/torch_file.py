"""One file as ``torch.save`` writes it, with many tensors whose values come one by one and are never together in memory.

The file's pickle and the place of every value follow from shapes and dtypes alone. So the pickle is written first, with
:class:`Slot` objects where tensors will be, and then each tensor's values go straight to their place, in any order, their
checksum taken on the way. Plain ``torch.load`` reads it (``weights_only=True``, mapped or not); the pickle names no class of
this package.
"""

from __future__ import annotations

import collections
import ctypes
import io
import os
import weakref
import zlib
from collections.abc import Iterator
from types import TracebackType
from typing import Any

import torch
from torch import nn

from ...errors import CheckpointError, ConfigError
from ..full.tied_weights import memory_key
from .archive import Member, end_of_archive
from .fileio import naming
from .mmap_buffer import copied
from .tensor_entry import Pickler, template

__all__ = ["Slot", "TorchFileWriter", "check_loadable", "first_line", "memory_of", "refused", "row_major"]

_REASON = "WeightsUnpickler error:"  # torch writes its reason behind it, between two pieces of advice
_BLOCK = 4 << 20  # bytes that are looked at twice, for the checksum and to write them, while they are in the cache


class Slot:
    """Stands for a row-major tensor in a structure. The same object at two places is one tensor with two names."""

    def __init__(self, shape: torch.Size, dtype: torch.dtype) -> None:
        self.shape, self.dtype = torch.Size(shape), dtype

    @property
    def nbytes(self) -> int:
        """Of the values."""
        return self.shape.numel() * self.dtype.itemsize

    def __repr__(self) -> str:
        return f"Slot({tuple(self.shape)}, {self.dtype})"


class TorchFileWriter:
    """Writes one file. As a context manager it closes at the end, and after an exception leaves the file unfinished.

    Args:
        path: of the file, which is made anew.
        structure: nested dicts, OrderedDicts (with their attributes, such as a state dict's ``_metadata``), lists, tuples and
            plain values; tensors in it are :class:`Slot` objects, or small real ones, which are written at once.

    Raises:
        CheckpointError: the structure holds what would not be loaded again; see :func:`check_loadable`.
        OSError: the file can't be made.
    """

    def __init__(self, path: str | os.PathLike[str], structure: Any) -> None:
        self.path = os.fspath(path)
        found = _Structure(structure)
        self._members: list[Member] = []
        self._slots: dict[int, int] = {}  # which member, by id of a slot
        self._given = found.slots  # which keeps them alive
        self._written: set[int] = set()
        head = bytearray()
        kind = template(torch.float32)
        for name, content in (("data.pkl", found.pickle), *kind.members_before):
            head += _small(self._members, name, content, len(head))
        at = len(head)
        for number, slot in enumerate(found.slots):
            member = Member(f"data/{number}", at, slot.nbytes)
            self._slots[id(slot)] = len(self._members)
            self._members.append(member)
            at = _values(member) + member.size + len(member.descriptor())
        self._end, self._behind = at, kind.members_behind
        self._fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | getattr(os, "O_CLOEXEC", 0), 0o666)
        # Not __del__, which may run at any time during the interpreter's end.
        self._closer = weakref.finalize(self, os.close, self._fd)
        try:
            self._put(bytes(head), 0)
            for slot, tensor in found.real:
                self.write(slot, tensor)
        except BaseException:
            self._closer()
            raise

    def write(self, slot: Slot, tensor: torch.Tensor) -> None:
        """Write the values of a slot.

        Args:
            slot: one of the structure's, each once, in any order.
            tensor: of its shape and dtype; any strides, any device.

        Raises:
            ConfigError: another slot, shape or dtype.
            OSError: the disk is full, for instance.
        """
        number = self._slots.get(id(slot))
        if number is None or number in self._written:
            raise ConfigError(f"{self.path}: {slot} is not in the file's structure, or was written before.")
        if tensor.shape != slot.shape or tensor.dtype != slot.dtype:
            raise ConfigError(f"{self.path}: {slot} was given a tensor {tuple(tensor.shape)}, {tensor.dtype}.")
        member = self._members[number]
        tensor = row_major(tensor)
        self._put(member.local(), member.offset)
        at, crc = _values(member), 0
        for block in memory_of(tensor):
            crc = zlib.crc32(block, crc)
            self._put(block, at)
            at += len(block)
        self._members[number] = member = Member(member.name, member.offset, member.size, crc)
        self._put(member.descriptor(), at)
        self._written.add(number)

    def _put(self, data: bytes | memoryview, at: int) -> None:
        view = memoryview(data)
        with naming(self.path):
            while view:
                count = os.pwrite(self._fd, view, at)
                view, at = view[count:], at + count

    def close(self) -> None:
        """Write the archive's directory and make the file durable.

        Raises:
            ConfigError: some slots were not written.
            OSError: the disk is full, for instance.
        """
        missing = [slot for slot in self._given if self._slots[id(slot)] not in self._written]
        if missing:
            raise ConfigError(f"{self.path}: {len(missing)} slots were not written, the first one is {missing[0]}.")
        tail = bytearray()
        for name, content in self._behind:
            tail += _small(self._members, name, content, self._end + len(tail))
        tail += end_of_archive(self._members, self._end + len(tail))
        self._put(bytes(tail), self._end)
        with naming(self.path):
            os.fsync(self._fd)
        self._closer()

    def abandon(self) -> None:
        """Close the file as it is: it can't be loaded."""
        self._closer()

    def __enter__(self) -> TorchFileWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                self.close()
        finally:
            self.abandon()


def check_loadable(value: Any, what: str) -> None:
    """Raise for objects in nested values that ``torch.load(weights_only=True)`` would refuse. Tensors' values are not looked at.

    Args:
        value: as for :class:`TorchFileWriter`.
        what: its name, for the message.

    Raises:
        CheckpointError: names the class and the remedy.
    """
    try:
        found = _Structure(value, trial=True)
        file = io.BytesIO()
        members: list[Member] = []
        kind = template(torch.float32)
        for name, content in (("data.pkl", found.pickle), *kind.members_before):
            file.write(_small(members, name, content, file.tell()))
        for number, slot in enumerate(found.slots):  # one zero for all values
            file.write(_small(members, f"data/{number}", bytes(slot.dtype.itemsize), file.tell()))
        for name, content in kind.members_behind:
            file.write(_small(members, name, content, file.tell()))
        file.write(end_of_archive(members, file.tell()))
        file.seek(0)
        torch.load(file, weights_only=True)
    except Exception as error:
        raise CheckpointError(
            f"{what} can't be saved: {type(error).__name__}: {refused(error)}. Checkpoints hold tensors, numbers, strings, "
            "lists, tuples and dicts, since unpickling anything else can run code. Convert it (vars(namespace), value.item()), "
            "or allow its class when saving and loading with torch.serialization.add_safe_globals([Class])."
        ) from error


def refused(error: Exception) -> str:
    """What torch's loader did not let through, out of its long advice."""
    lines = [line.strip() for line in str(error).splitlines()]
    named = [line for line in lines if "GLOBAL" in line or "Unsupported" in line]
    named += str(error).partition(_REASON)[2].strip().splitlines()[:1]
    return (named or [first_line(error)])[0].rstrip(".")


def first_line(error: Exception) -> str:
    """Of a message, which may be empty."""
    return next(iter(str(error).strip().splitlines()), "no reason given")


class _Structure:
    """The pickle of a structure, and the slots in it in the order of their members."""

    def __init__(self, structure: Any, trial: bool = False) -> None:
        self.slots: list[Slot] = []
        self.real: list[tuple[Slot, torch.Tensor]] = []
        self._numbers: dict[int, int] = {}
        self._same: dict[Any, Slot] = {}
        file = io.BytesIO()
        _StructurePickler(file, self, trial).dump(structure)
        self.pickle = file.getvalue()

    def number(self, slot: Slot) -> int:
        """Its member's; a slot that is new gets the next."""
        number = self._numbers.setdefault(id(slot), len(self.slots))
        if number == len(self.slots):
            self.slots.append(slot)
        return number

    def slot_of(self, tensor: torch.Tensor) -> Slot:
        """A slot for a real tensor; tensors that share their memory share a slot."""
        key = memory_key(tensor)
        found = self._same.get(key) if tensor.numel() else None
        if found is None:
            found = self._same[key] = Slot(tensor.shape, tensor.dtype)
            self.real.append((found, tensor.detach()))
        return found


class _StructurePickler(Pickler):
    def __init__(self, file: io.BytesIO, found: _Structure, trial: bool) -> None:
        super().__init__(file, protocol=2)
        self.found, self.trial = found, trial
        self.kept: list[Any] = []  # the pickler remembers objects by id, so none may go

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Slot):
            return self._reduced(obj)
        if type(obj) in (torch.Tensor, nn.Parameter) and obj.layout == torch.strided and not obj.is_quantized:
            slot = self.found.slot_of(obj)
            if type(obj) is nn.Parameter:
                return torch._utils._rebuild_parameter, (slot, obj.requires_grad, collections.OrderedDict())
            return self._reduced(slot)
        if isinstance(obj, (torch.TypedStorage, torch.UntypedStorage)):
            raise CheckpointError("it holds a tensor of a class or layout of its own; save a plain dense one.")
        return NotImplemented  # a ShardTensor refuses by itself, with the remedy

    def _reduced(self, slot: Slot) -> Any:
        made = template(slot.dtype).rebuilt(slot.shape, str(self.found.number(slot)), repeated=self.trial)
        self.kept.append(made)
        return made.__reduce__()


def _small(members: list[Member], name: str, content: bytes, at: int) -> bytes:
    """The bytes of a small member that begins at `at`; adds it to `members`."""
    member = Member(name, at, len(content), zlib.crc32(content))
    members.append(member)
    return member.local(aligned=False) + content + member.descriptor()


def _values(member: Member) -> int:
    """Where a member's content begins."""
    return member.offset + len(member.local())


def row_major(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor itself where it is row-major on the CPU, else such a copy."""
    tensor = tensor.detach().resolve_conj().resolve_neg()
    return tensor if tensor.device.type == "cpu" and tensor.is_contiguous() else copied(tensor)


def memory_of(tensor: torch.Tensor) -> Iterator[memoryview]:
    """The memory of a row-major tensor on the CPU, in parts. The tensor must outlive them."""
    size, address = tensor.numel() * tensor.element_size(), tensor.data_ptr()
    for at in range(0, size, _BLOCK):
        yield memoryview((ctypes.c_char * min(_BLOCK, size - at)).from_address(address + at)).cast("B")
