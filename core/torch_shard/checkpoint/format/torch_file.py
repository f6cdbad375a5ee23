"""A writer of files as ``torch.save`` writes them, for tensors that come one by one and are never together in memory.

The file is a zip archive, written by the standard library. Its pickle follows from shapes and dtypes alone, so it is written
first, with :class:`Slot` objects where tensors will be. Each tensor's values are a member of their own, in the order in which
they come. Plain ``torch.load`` reads the file (``weights_only=True``, mapped or not); the pickle names no class of this package.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import io
import os
import pickle
import zipfile
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ...errors import CheckpointError, ConfigError
from ...layout.flat_layout import contiguous_stride
from ...utils.tensor_memory import memory_key
from .fileio import Progress, first_line, naming
from .mmap_buffer import blocks_of, row_major
from .tensor_entry import ALIGNMENT

_BLOCK = 1 << 20  # bytes that are read at once
_REASON = "WeightsUnpickler error:"  # followed by torch's reason, between two pieces of advice
_LARGE = 1 << 30  # the fewest bytes of values for which a member's header has a field for sizes of 64 bits
_HEADER = 30  # bytes of a member's header without its name and its fields
_WIDE, _FIELD = 20, 4  # bytes of the field for sizes of 64 bits, and of a field without content


@dataclasses.dataclass(frozen=True, eq=False)
class Slot:
    """A placeholder for a row-major tensor in a structure. The same object at two places is one tensor with two names."""

    shape: torch.Size
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """The number of bytes of the values."""
        return self.shape.numel() * self.dtype.itemsize


class TorchFileWriter:
    """A writer of one file, which is complete when :meth:`close` returns.

    Args:
        path: the file, which is made anew.
        structure: nested dicts, OrderedDicts (with their attributes, such as a state dict's ``_metadata``), lists, tuples and
            plain values; tensors in it are :class:`Slot` objects, or small real ones, which are written at once.

    Raises:
        CheckpointError: the structure holds what would not be loaded again; see :func:`check_loadable`.
        OSError: the file can't be made.
    """

    def __init__(self, path: str | os.PathLike[str], structure: Any) -> None:
        self.path = os.fspath(path)
        found = _Pickler(structure)
        self._missing = dict(found.numbers)
        self._file = open(self.path, "wb")  # noqa: SIM115 - closed by close or abandon
        self._archive = zipfile.ZipFile(self._file, "w")
        try:
            with naming(self.path):
                _write_small(self._archive, found.content)
            for slot, tensor in found.real:
                self.write(slot, tensor)
        except BaseException:
            self.abandon()
            raise

    def write(self, slot: Slot, tensor: torch.Tensor) -> None:
        """Write the values of a slot.

        Args:
            slot: one of the structure's, each once, in any order.
            tensor: a tensor of the slot's shape and dtype, with any strides, on any device.

        Raises:
            ConfigError: another slot, shape or dtype.
            OSError: the disk is full, for instance.
        """
        if slot not in self._missing:
            raise ConfigError(f"{self.path}: {slot} is not in the file's structure, or was written before.")
        if tensor.shape != slot.shape or tensor.dtype != slot.dtype:
            raise ConfigError(f"{self.path}: {slot} was given a tensor {tuple(tensor.shape)}, {tensor.dtype}.")
        tensor = row_major(tensor)
        with naming(self.path):
            member, is_large = zipfile.ZipInfo(f"archive/data/{self._missing[slot]}"), slot.nbytes >= _LARGE
            start = self._file.tell() + _HEADER + len(member.filename) + is_large * _WIDE + _FIELD
            padding = -start % ALIGNMENT  # so that the values can be mapped
            member.extra = b"FB" + padding.to_bytes(2, "little") + b"Z" * padding
            with self._archive.open(member, "w", force_zip64=is_large) as out:
                for block in blocks_of(tensor):
                    out.write(block)
        del self._missing[slot]

    def close(self) -> None:
        """Write the archive's directory and make the file durable.

        Raises:
            ConfigError: some slots were not written.
            OSError: the disk is full, for instance.
        """
        if self._missing:
            first = next(iter(self._missing))
            raise ConfigError(f"{self.path}: {len(self._missing)} slots were not written, the first one is {first}.")
        with naming(self.path), self._file:
            self._archive.close()
            self._file.flush()
            os.fsync(self._file.fileno())

    def abandon(self) -> None:
        """Close the file as it is, so that it can't be loaded; do nothing after :meth:`close`."""
        with contextlib.suppress(OSError):  # what is in the buffer may not fit on the disk
            self._file.close()
        with contextlib.suppress(ValueError):  # the file is closed, so that the archive can't complete it
            self._archive.close()


def verify_torch_file(
    file: Path | io.BytesIO,
    rank: int = 0,
    ranks: int = 1,
    progress: Progress = lambda nbytes: None,
    ending: str = "",
) -> None:
    """Compare the members of an archive with their CRC-32, which ``torch.load`` does not. Not collective.

    Args:
        file: what ``torch.save`` or :class:`TorchFileWriter` wrote.
        rank, ranks: this rank, and the number of ranks that divide the members among them.
        progress: told the bytes of each read.
        ending: the members are compared whose names end so.

    Raises:
        Exception: a member is damaged, or the archive is; of any class, because damage can lead zipfile anywhere.
    """
    with zipfile.ZipFile(file) as archive:
        members = [member for member in archive.infolist() if member.filename.endswith(ending)]
        members.sort(key=lambda member: member.file_size, reverse=True)
        for member in members[rank::ranks]:
            if member.CRC == 0:  # torch.serialization.set_crc32_options(False)
                continue
            with archive.open(member) as content:
                while data := content.read(_BLOCK):
                    progress(len(data))


def check_loadable(value: Any, what: str) -> None:
    """Raise if nested values hold an object that ``torch.load(weights_only=True)`` would refuse. Tensors' values are not read.

    Args:
        value: a structure as :class:`TorchFileWriter` takes it.
        what: its name, for the message.

    Raises:
        CheckpointError: names the class and the remedy.
    """
    try:
        file = io.BytesIO()
        with zipfile.ZipFile(file, "w") as archive:
            _write_small(archive, _Pickler(value, trial=True).content)
        file.seek(0)
        with torch.serialization.skip_data():
            torch.load(file, weights_only=True)
    except Exception as error:
        raise not_loadable(what, error) from error


def not_loadable(what: str, error: Exception) -> CheckpointError:
    """Return the error for an object that torch's loader would refuse."""
    return CheckpointError(
        f"{what} can't be saved: {type(error).__name__}: {refused(error)}. Checkpoints hold tensors, numbers, strings, lists, "
        "tuples and dicts, since unpickling anything else can run code. Convert it (vars(namespace), value.item()), or allow its "
        "class when saving and loading with torch.serialization.add_safe_globals([Class])."
    )


def not_trusted(what: str, error: Exception) -> CheckpointError:
    """Return the error for an object in a file that torch's loader refuses."""
    return CheckpointError(
        f"{what} was refused and nothing was loaded, since unpickling it could run code: {refused(error)}. If you trust the "
        "file, allow the class with torch.serialization.add_safe_globals([Class]) and load again."
    )


def refused(error: Exception) -> str:
    """Return the line of a loader's long advice that names what was refused."""
    lines = [line.strip() for line in str(error).splitlines()]
    named = [line for line in lines if "GLOBAL" in line or "Unsupported" in line]
    named += str(error).partition(_REASON)[2].strip().splitlines()[:1]
    return (named or [first_line(error)])[0].rstrip(".")


@functools.cache
def _small_members() -> dict[str, bytes]:
    """Return the members that torch.save writes beside the pickle and the values.

    Without ``.format_version``, which tells torch that it may compute where values are instead of looking
    (``torch.utils.serialization.config.load.calculate_storage_offsets``).
    """
    file = io.BytesIO()
    torch.save(None, file)
    with zipfile.ZipFile(file) as archive:
        return {name: archive.read(f"archive/{name}") for name in ("byteorder", "version")}


def _write_small(archive: zipfile.ZipFile, pickled: bytes) -> None:
    for name, content in {"data.pkl": pickled, **_small_members()}.items():
        archive.writestr(zipfile.ZipInfo(f"archive/{name}"), content)


class _Values:
    """A placeholder for a tensor's memory in a pickle."""

    def __init__(self, pid: tuple[Any, ...]) -> None:
        self.pid = pid


class _Pickler(pickle.Pickler):
    """A pickler of one structure.

    Attributes:
        content: the pickle.
        numbers: the structure's slots with their numbers, in order.
        real: real tensors in the structure, with the slots that were made for them.
    """

    def __init__(self, structure: Any, trial: bool = False) -> None:
        """Pickle `structure`. With `trial` each tensor has one element of memory only, however large it is."""
        file = io.BytesIO()
        super().__init__(file, protocol=2)
        self.numbers: dict[Slot, int] = {}
        self.real: list[tuple[Slot, torch.Tensor]] = []
        self._slot_of_memory: dict[Any, Slot] = {}
        self._trial = trial
        self.dump(structure)
        self.content = file.getvalue()

    def persistent_id(self, obj: Any) -> Any:
        return obj.pid if isinstance(obj, _Values) else None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, Slot):
            return self._reduced(obj)
        if type(obj) in (torch.Tensor, nn.Parameter) and obj.layout == torch.strided and not obj.is_quantized:
            slot = self._slot_of(obj)
            if type(obj) is nn.Parameter:
                return torch._utils._rebuild_parameter, (slot, obj.requires_grad, collections.OrderedDict())
            return self._reduced(slot)
        if isinstance(obj, (torch.TypedStorage, torch.UntypedStorage)):
            raise CheckpointError("it holds a tensor of a class or layout of its own; save a plain dense one.")
        return NotImplemented  # a ShardTensor refuses by itself, with the remedy

    def _slot_of(self, tensor: torch.Tensor) -> Slot:
        """Return a slot for a real tensor; tensors that share their memory share a slot."""
        key = memory_key(tensor)
        found = self._slot_of_memory.get(key) if tensor.numel() else None
        if found is None:
            found = self._slot_of_memory[key] = Slot(tensor.shape, tensor.dtype)
            self.real.append((found, tensor.detach()))
        return found

    def _reduced(self, slot: Slot) -> Any:
        """Reduce a slot as an empty tensor of its dtype is reduced, but with other memory, shape and strides."""
        function, (storage, offset, _shape, _stride, *rest) = torch.empty(
            0, dtype=slot.dtype, device="cpu"
        ).__reduce_ex__(2)
        number = self.numbers.setdefault(slot, len(self.numbers))
        numel = 1 if self._trial else slot.shape.numel()
        kind = torch.UntypedStorage  # of newer dtypes, with a size in bytes
        if isinstance(storage, torch.TypedStorage):
            kind = getattr(torch, storage._pickle_storage_type())
        size = numel * slot.dtype.itemsize if kind is torch.UntypedStorage else numel
        values = _Values(("storage", kind, str(number), "cpu", size))
        stride = (0,) * len(slot.shape) if self._trial else contiguous_stride(slot.shape)
        return function, (values, offset, tuple(slot.shape), stride, *rest)
