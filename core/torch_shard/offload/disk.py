"""Tensors on disk: read ahead of their use, and written behind it.

The tensors of a process are regions of one file, each mapped into memory and shared with the page cache. So a tensor is always
exact, whoever reads it and whenever: what is not in memory comes from the disk when it is touched. Reading ahead and writing
behind change only when the disk is waited for, and how much memory is in use::

    unit             1          2          3          4
    read_ahead    |-----|    |-----|    |-----|    |-----|                    a thread
    step                     |==|       |==|       |==|       |==|            the caller
    write_behind                 |------|   |------|   |------|  |-----|      another thread

A unit (what is passed in one call) takes memory from the beginning of its read_ahead until its write_behind has ended. `BEHIND`
calls of write_behind may be unfinished; a further one waits. So with one unit read ahead, `PAGED` units are in memory at most.

The file has no name in its directory: the kernel frees its space when the process ends, however it ends, and any number of
processes and runs can use one directory.

Space is taken when a tensor is made: a full disk is an error then, and not the end of the process later. That holds where files
are overwritten in place (ext4, xfs). File systems that copy on write (btrfs, zfs) need space for each write, too; if it is
missing then, :meth:`DiskStore.wait` says so.
"""

from __future__ import annotations

import errno
import os
import sys
import tempfile
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as all_done
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ..config.offload import BEHIND
from ..errors import DiskError, UnavailableError
from ..log import logger
from . import paging
from .memory_limits import formatted

__all__ = ["DiskStore", "Transferred"]

_EXTENT = 2 << 20
"""Regions begin at multiples of this many bytes, the size of the largest pages of the cache: a page that belonged to two regions
would be dropped with neither. What lies between two regions is a hole, which takes no space."""


@dataclass
class Transferred:
    """What a store has done so far.

    Attributes:
        allocated: bytes of the tensors that exist.
        read: bytes that were read ahead, whether they came from the disk or were still in memory.
        written: bytes that were written behind.
        waited: seconds for which callers waited for the disk, in ``write_behind`` and ``wait``; page faults are not in it.
    """

    allocated: int = 0
    read: int = 0
    written: int = 0
    waited: float = 0.0


@dataclass(eq=False)
class _Region:
    """A part of the file, and where it is mapped."""

    name: str
    offset: int
    nbytes: int
    address: int
    storage: weakref.ref[Any]
    wanted: bool = False  # read ahead, and not yet written behind
    reading: Future[None] | None = None

    @property
    def extent(self) -> int:
        return _extent(self.nbytes)


def _extent(nbytes: int) -> int:
    return -(-nbytes // _EXTENT) * _EXTENT


class _File:
    """The file, and all that threads and finalizers need of the store, which they must not keep alive.

    It is closed when nobody refers to it any more, or by :meth:`close`.
    """

    def __init__(self, directory: Path) -> None:
        self.fd = _open_unnamed(directory)
        self.owner = os.getpid()
        self.lock = threading.RLock()  # finalizers take it, which may run in the middle of whatever has it
        self.regions: dict[int, _Region] = {}  # by address
        self.error: DiskError | None = None
        self.transferred = Transferred()
        self.size = 0
        self._free: dict[int, list[tuple[int, bool]]] = {}  # by extent: where, and whether it holds zeros
        self._end = weakref.finalize(self, os.close, self.fd)
        self._end.atexit = False

    @property
    def is_open(self) -> bool:
        return self._end.alive

    def close(self) -> None:
        with self.lock:
            self._end()

    def take(self, extent: int) -> tuple[int, bool]:
        """Return where there is place for a region, and whether it holds zeros."""
        with self.lock:
            if free := self._free.get(extent):
                return free.pop()
            self.size += extent
            return self.size - extent, True

    def give_back(self, offset: int, extent: int) -> None:
        """Free the space of a region, which is mapped no more."""
        with self.lock:  # while it is held, the number `fd` stays that of the file
            if self.is_open:
                is_zero = paging.punch(self.fd, offset, extent)
                self._free.setdefault(extent, []).append((offset, is_zero))


def _open_unnamed(directory: Path) -> int:
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR):
            raise
    fd, path = tempfile.mkstemp(prefix="torch-shard-", dir=directory)  # a file system that has only files with names
    os.unlink(path)
    return fd


class DiskStore:
    """Tensors of this process in a file without a name. Not collective; safe to use from several threads.

    Args:
        directory: made where it is missing.
        rank: of this process, for messages.

    Attributes:
        in_memory: the directory's file system keeps its files in memory.

    Raises:
        UnavailableError: this isn't Linux.
        DiskError: the directory can't be made, or not be written.
    """

    def __init__(self, directory: str | os.PathLike[str], *, rank: int) -> None:
        if sys.platform != "linux":
            raise UnavailableError(
                f"state on disk (nvme={os.fspath(directory)!r}) needs Linux; this is {sys.platform}."
            )
        self.directory, self.rank = Path(directory).absolute(), rank
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            self._file = _File(self.directory)
        except OSError as error:
            raise DiskError(
                f"rank {rank}: nvme={os.fspath(directory)!r} can't be used: {error.strerror} ({error.filename}). Name a "
                "directory that every rank can write."
            ) from error
        self.in_memory = _lies_in_memory(self._file.fd)
        if self.in_memory:
            logger.warning("nvme=%r lies in memory (tmpfs): nothing is saved by it", os.fspath(directory))
        self._unfinished: deque[Future[None]] = deque()  # write_behind's
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="torch_shard disk reader")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="torch_shard disk writer")

    @property
    def transferred(self) -> Transferred:
        """Sums since the beginning; a live object, to read only."""
        return self._file.transferred

    def allocate(self, name: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """Return a 1-D CPU tensor of zeros on the disk. Nothing of it is in memory until it is used.

        Its space is free again when the last tensor that views it is gone.

        Args:
            name: for messages; need not be unique.
            numel: number of elements. With 0 nothing is taken.
            dtype: any with whole bytes.

        Raises:
            DiskError: the space can't be had: what is needed, and what is free; nothing has changed. Or: a transfer failed
                before.
        """
        self._check()
        nbytes = numel * dtype.itemsize
        if nbytes == 0:
            return torch.empty(0, dtype=dtype, device="cpu")
        file = self._file
        offset, is_zero = file.take(_extent(nbytes))
        try:
            os.posix_fallocate(file.fd, offset, nbytes)
            memory = paging.map_shared(file.fd, offset, nbytes)
        except OSError as error:
            file.give_back(offset, _extent(nbytes))
            raise DiskError(
                f"rank {self.rank}: {name!r} can't be put on disk: {error.strerror}. It needs {formatted(nbytes)} in "
                f"{self.directory}, beside {formatted(self.transferred.allocated)} that this rank has there already, and "
                f"{_free(file.fd)} are free. Make space, or use another directory."
            ) from error
        tensor = torch.frombuffer(memory, dtype=torch.uint8)
        storage = tensor.untyped_storage()
        region = _Region(name, offset, nbytes, storage.data_ptr(), weakref.ref(storage))
        with file.lock:
            file.regions[region.address] = region
            file.transferred.allocated += nbytes
        # `memory` is gone when the storage is, which refers to it.
        weakref.finalize(memory, _forget, region, file).atexit = False
        return (tensor if is_zero else tensor.zero_()).view(dtype)

    def read_ahead(self, tensors: Iterable[torch.Tensor]) -> None:
        """Begin to read tensors that will soon be used, and changed. Returns at once.

        Args:
            tensors: of this store. A view stands for the whole tensor that was allocated.

        Raises:
            DiskError: a transfer failed before; the message names the tensor. What is in the tensors stays readable.
            ValueError: a tensor is not of this store.
        """
        self._check()
        found = self._find(tensors)
        if not found:
            return
        regions = [region for region, _ in found]
        for region in regions:
            region.wanted = True
        future = self._reader.submit(_read, found, self._file, self.rank)
        for region in regions:
            region.reading = future

    def wait(self, tensors: Iterable[torch.Tensor]) -> None:
        """Wait until tensors that were read ahead are there. To be called before they are used.

        Without it they are just as exact, but a disk that can't be read ends the process (SIGBUS), and is an error here.

        Raises:
            As :meth:`read_ahead`.
        """
        self._check()
        self._wait_for({region.reading for region, _ in self._find(tensors) if region.reading is not None})
        self._check()

    def write_behind(self, tensors: Iterable[torch.Tensor]) -> None:
        """Begin to write tensors that were changed, and then give their memory back.

        Returns at once, unless `BEHIND` such calls have not ended: then it waits for the oldest. The tensors may be used at any
        time, also before it has ended; those read ahead again keep their memory.

        Raises:
            As :meth:`read_ahead`.
        """
        self._check()
        found = self._find(tensors)
        if not found:
            return
        with self._file.lock:
            while self._unfinished and self._unfinished[0].done():
                self._unfinished.popleft()
            oldest = [self._unfinished.popleft() for _ in range(len(self._unfinished) - BEHIND + 1)]
        self._wait_for(set(oldest))
        self._check()
        for region, _ in found:
            region.wanted = False
        future = self._writer.submit(_write, found, self._file, self.rank)
        with self._file.lock:
            self._unfinished.append(future)

    def flush(self) -> None:
        """Wait for everything that was begun.

        Raises:
            DiskError: a transfer failed.
        """
        self._check()
        with self._file.lock:
            futures = {*self._unfinished, *(region.reading for region in self._file.regions.values())}
        self._wait_for({future for future in futures if future is not None})
        self._check()

    def resident_bytes(self) -> int:
        """Return how much of this store's tensors is in memory: mapped, or in the page cache."""
        alive = [(region, region.storage()) for region in list(self._file.regions.values())]
        return sum(paging.resident(region.address, region.nbytes) for region, storage in alive if storage is not None)

    def close(self) -> None:
        """End the threads, and close the file. Tensors stay readable, and keep their space, until they are gone."""
        if os.getpid() != self._file.owner:
            return
        for region in list(self._file.regions.values()):
            region.wanted = False  # ends what is being read
        for pool in (self._reader, self._writer):
            pool.shutdown(cancel_futures=True)
        self._file.close()

    def _check(self) -> None:
        file = self._file
        if os.getpid() != file.owner:
            raise DiskError(
                f"state in {self.directory} belongs to process {file.owner}, which has forked this one: it can be read here only."
            )
        if file.error is not None:
            raise DiskError(str(file.error)) from file.error
        if not file.is_open:
            raise DiskError(f"the state in {self.directory} has been closed.")

    def _find(self, tensors: Iterable[torch.Tensor]) -> list[tuple[_Region, Any]]:
        """Return each one's region, once, with its storage: while a thread works on the mapping, it must not go."""
        found: dict[int, tuple[_Region, Any]] = {}
        for tensor in tensors:
            if tensor.numel() == 0:
                continue
            storage = tensor.untyped_storage()
            region = self._file.regions.get(storage.data_ptr())
            if region is None or region.storage() is not storage:
                raise ValueError(
                    f"a tensor of shape {tuple(tensor.shape)} was not allocated by the store in {self.directory}"
                )
            found[region.address] = region, storage
        return list(found.values())

    def _wait_for(self, futures: set[Future[None]]) -> None:
        if not all(future.done() for future in futures):
            began = time.perf_counter()
            all_done(futures)  # they raise nothing: errors are kept with the file
            with self._file.lock:
                self.transferred.waited += time.perf_counter() - began


def _free(fd: int) -> str:
    found = os.fstatvfs(fd)
    return formatted(found.f_bavail * found.f_frsize)


def _lies_in_memory(fd: int) -> bool:
    device = os.fstat(fd).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    mounts = [line.split(" ") for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return any(mount[2] == number and mount[mount.index("-") + 1] in ("tmpfs", "ramfs") for mount in mounts)


def _forget(region: _Region, file: _File) -> None:
    """Nothing views the region any more. Runs in any thread, also within this module's own code."""
    if os.getpid() != file.owner:
        paging.unmap(region.address, region.nbytes)
        return
    with file.lock:
        del file.regions[region.address]  # first: the next one may be mapped at this place
        file.transferred.allocated -= region.nbytes
    paging.unmap(region.address, region.nbytes)
    file.give_back(region.offset, region.extent)


# -- in the background ------------------------------------------------------------------------------------------------


def _each(found: list[tuple[_Region, Any]]) -> Iterator[_Region]:
    """Yield the regions, one by one; each is let go of when its turn is over."""
    found.reverse()
    while found:
        yield found[-1][0]
        found.pop()


def _read(found: list[tuple[_Region, Any]], file: _File, rank: int) -> None:
    for region in _each(found):
        try:
            if paging.fetch(region.address, region.nbytes, go_on=lambda region=region: region.wanted):  # type: ignore[misc]
                with file.lock:
                    file.transferred.read += region.nbytes
        except Exception as error:
            _fail(file, f"rank {rank}: {region.name!r} can't be read from disk", error)


def _write(found: list[tuple[_Region, Any]], file: _File, rank: int) -> None:
    for region in _each(found):
        try:
            if not region.wanted:
                # First: some file systems learn only by it which pages were changed.
                paging.unmap_pages(region.address, region.nbytes)
            paging.write_out(file.fd, region.offset, region.nbytes)
            if not region.wanted:
                paging.drop(file.fd, region.offset, region.extent)
            with file.lock:
                file.transferred.written += region.nbytes
        except Exception as error:
            _fail(file, f"rank {rank}: {region.name!r} can't be written to disk", error)


def _fail(file: _File, what: str, error: Exception) -> None:
    reason = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
    failure = DiskError(
        f"{what}: {reason}. What was changed since may be lost: restart from a checkpoint, with another directory for nvme=."
    )
    failure.__cause__ = error
    with file.lock:
        file.error = file.error or failure
