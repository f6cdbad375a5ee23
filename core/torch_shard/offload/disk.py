"""Tensors on disk: read ahead of their use, and written behind it.

Each tensor is a file of its own, mapped into memory and shared with the page cache. So a tensor is exact for every reader at
any time: what is not in memory comes from the disk when it is touched. Reading ahead and writing behind change only when the
disk is waited for, and how much memory is in use::

    unit             1          2          3          4
    read_ahead    |-----|    |-----|    |-----|    |-----|                    a thread
    step                     |==|       |==|       |==|       |==|            the caller
    write_behind                 |------|   |------|   |------|  |-----|      another thread

A unit (what is passed in one call) takes memory from the beginning of its read_ahead until its write_behind has ended. `BEHIND`
calls of write_behind may be unfinished; a further one waits. So with one unit read ahead, `PAGED` units are in memory at most.

The files have no names in the directory, and no file descriptors: the kernel frees a file's space with the tensor, and when the
process ends, however it ends. Any number of processes and runs can use one directory.

Space is taken when a tensor is made: a full disk is an error then, and not the end of the process later. That holds where files
are overwritten in place (ext4, xfs). File systems that copy on write (btrfs, zfs) need space for each write, too; if it is
missing then, :meth:`DiskStore.wait` says so.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, MutableMapping
from concurrent import futures
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary

from ..config.offload import BEHIND
from ..errors import DiskError, UnavailableError
from . import paging
from .memory_limits import formatted


@dataclass(eq=False)
class _Mapping:
    """A file that is mapped into memory, as the storage of one tensor."""

    name: str
    address: int
    nbytes: int
    wanted: bool = False  # was read ahead, and not yet written behind
    reading: futures.Future[None] | None = None


class DiskStore:
    """Tensors of this process in files without names. Not collective; safe to use from several threads.

    Args:
        directory: the directory for the files, which is made if it is missing.
        rank: the rank of this process, for messages.

    Raises:
        UnavailableError: this isn't Linux.
        DiskError: the directory can't be made, or not be written.
    """

    def __init__(self, directory: str | os.PathLike[str], *, rank: int) -> None:
        if sys.platform != "linux":
            raise UnavailableError(
                f"state on disk (nvme={os.fspath(directory)!r}) needs Linux; this is {sys.platform}."
            )
        self.directory, self.rank, self._owner = Path(directory).absolute(), rank, os.getpid()
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self.directory).close()
        except OSError as error:
            raise DiskError(
                f"rank {rank}: nvme={os.fspath(directory)!r} can't be used: {error.strerror} ({error.filename}). Name a "
                "directory that every rank can write."
            ) from error
        self._error: DiskError | None = None
        self._mappings: MutableMapping[Any, _Mapping] = WeakIdKeyDictionary()  # by storage
        self._unfinished: deque[futures.Future[None]] = deque()  # write_behind's
        self._reader = futures.ThreadPoolExecutor(1, thread_name_prefix="torch_shard disk reader")
        self._writer = futures.ThreadPoolExecutor(1, thread_name_prefix="torch_shard disk writer")

    @property
    def allocated(self) -> int:
        """The bytes of the tensors that exist."""
        return sum(mapping.nbytes for mapping in list(self._mappings.values()))

    def allocate(self, name: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a 1-D CPU tensor of zeros on the disk. Nothing of it is in memory until it is used.

        Its space is free again when the last tensor that views it is gone.

        Args:
            name: a name for messages, which need not be unique.
            numel: number of elements. With 0 nothing is taken.
            dtype: any dtype of whole bytes.

        Raises:
            DiskError: there is not enough space, so that nothing has changed; or a transfer failed before.
        """
        self._check()
        nbytes = numel * dtype.itemsize
        if nbytes == 0:
            return torch.empty(0, dtype=dtype, device="cpu")
        try:
            with tempfile.TemporaryFile(dir=self.directory) as file:
                os.posix_fallocate(file.fileno(), 0, nbytes)
                path = f"/proc/self/fd/{file.fileno()}"
                tensor = torch.from_file(path, shared=True, size=nbytes, dtype=torch.uint8, device="cpu")
        except (OSError, RuntimeError) as error:  # of the file; of torch's mapping
            raise DiskError(
                f"rank {self.rank}: {name!r} can't be put on disk: {_reason(error)}. It needs {formatted(nbytes)} in "
                f"{self.directory}, beside {formatted(self.allocated)} that this rank has there already, and "
                f"{formatted(shutil.disk_usage(self.directory).free)} are free. Make space, or use another directory."
            ) from error
        self._mappings[tensor.untyped_storage()] = _Mapping(name, tensor.data_ptr(), nbytes)
        return tensor.view(dtype)

    def read_ahead(self, tensors: Iterable[torch.Tensor]) -> None:
        """Begin to read tensors that will soon be used, and changed. Returns at once.

        Args:
            tensors: tensors of this store. A view stands for the full tensor that was allocated.

        Raises:
            DiskError: a transfer failed before; the message names the tensor. What is in the tensors stays readable.
            KeyError: a tensor is not of this store.
        """
        found = self._find(tensors)
        for mapping in found:
            mapping.wanted = True
        future = self._reader.submit(self._each, found, _read, "read from")
        for mapping in found:
            mapping.reading = future

    def wait(self, tensors: Iterable[torch.Tensor]) -> None:
        """Wait until tensors that were read ahead are in memory. Call this before they are used.

        Tensors are exact without this call, too. But a disk that can't be read is an error here, and otherwise ends the process
        (SIGBUS).

        Raises:
            As :meth:`read_ahead`.
        """
        futures.wait({mapping.reading for mapping in self._find(tensors) if mapping.reading is not None})
        self._check()

    def write_behind(self, tensors: Iterable[torch.Tensor]) -> None:
        """Begin to write tensors that were changed, and then give their memory back.

        Returns at once, unless `BEHIND` such calls have not ended: then it waits for the oldest. The tensors may be used at any
        time, also before it has ended; those read ahead again keep their memory.

        Raises:
            As :meth:`read_ahead`.
        """
        found = self._find(tensors)
        for mapping in found:
            mapping.wanted = False
        self._unfinished.append(self._writer.submit(self._each, found, _write, "written to"))
        while len(self._unfinished) > BEHIND:
            self._unfinished.popleft().result()
        self._check()

    def close(self) -> None:
        """End the threads. Tensors stay readable, and keep their space, until they are gone."""
        for mapping in list(self._mappings.values()):
            mapping.wanted = False  # ends what is being read
        for pool in (self._reader, self._writer):
            pool.shutdown(cancel_futures=True)

    def _check(self) -> None:
        if os.getpid() != self._owner:
            raise DiskError(
                f"state in {self.directory} belongs to process {self._owner}, which has forked this one: it can only be read."
            )
        if self._error is not None:
            raise DiskError(str(self._error)) from self._error

    def _find(self, tensors: Iterable[torch.Tensor]) -> dict[_Mapping, Any]:
        """Return each tensor's mapping, once, with its storage: while a thread works on a mapping, the storage must not go."""
        self._check()
        found: dict[_Mapping, Any] = {}
        for tensor in tensors:
            if tensor.numel():
                storage = tensor.untyped_storage()
                found[self._mappings[storage]] = storage
        return found

    def _each(self, found: dict[_Mapping, Any], work: Callable[[_Mapping], None], what: str) -> None:
        """Do `work` on each mapping, in a thread. What fails is raised by the next call."""
        for mapping in found:
            try:
                work(mapping)
            except Exception as error:
                failure = DiskError(
                    f"rank {self.rank}: {mapping.name!r} can't be {what} disk: {_reason(error)}. What was changed since may be "
                    "lost: restart from a checkpoint, with another directory for nvme=."
                )
                failure.__cause__ = error
                self._error = self._error or failure


def _read(mapping: _Mapping) -> None:
    paging.fetch(mapping.address, mapping.nbytes, go_on=lambda: mapping.wanted)


def _write(mapping: _Mapping) -> None:
    paging.write_out(mapping.address, mapping.nbytes)
    if not mapping.wanted:
        paging.drop(mapping.address, mapping.nbytes)


def _reason(error: Exception) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error)
