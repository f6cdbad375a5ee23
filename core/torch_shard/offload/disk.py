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

_PAUSES = (0.0, 0.001, 0.01, 0.05)
"""Seconds before each attempt to drop pages. The kernel keeps those that it is about to write elsewhere (its own flusher, a
``sync``), also clean ones beside them."""


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


class DiskStore:
    """Tensors of this process in a file without a name. Not collective; safe to use from several threads.

    Args:
        directory: made where it is missing.
        rank: of this process, for messages.

    Attributes:
        in_memory: the directory's file system keeps its files in memory.
        transferred: sums since the beginning, to read only.

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
            self._fd = _open_unnamed(self.directory)
        except OSError as error:
            raise DiskError(
                f"rank {rank}: nvme={os.fspath(directory)!r} can't be used: {error.strerror} ({error.filename}). Name a "
                "directory that every rank can write."
            ) from error
        self._end = weakref.finalize(self, os.close, self._fd)
        self._end.atexit = False
        self.in_memory = _lies_in_memory(self._fd)
        if self.in_memory:
            logger.warning("nvme=%r lies in memory (tmpfs): nothing is saved by it", os.fspath(directory))
        self.transferred = Transferred()
        self._error: DiskError | None = None
        self._size = 0
        self._regions: dict[int, _Region] = {}  # by address
        self._free: dict[int, list[tuple[int, bool]]] = {}  # by extent: where, and whether it holds zeros
        self._lock = threading.RLock()  # a tensor may go, which takes it, in the middle of whatever has it
        self._unfinished: deque[Future[None]] = deque()  # write_behind's
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="torch_shard disk reader")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="torch_shard disk writer")

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
        offset, is_zero = self._take(_extent(nbytes))
        try:
            os.posix_fallocate(self._fd, offset, nbytes)
            memory = paging.map_shared(self._fd, offset, nbytes)
        except OSError as error:
            self._give_back(offset, _extent(nbytes))
            raise DiskError(
                f"rank {self.rank}: {name!r} can't be put on disk: {error.strerror}. It needs {formatted(nbytes)} in "
                f"{self.directory}, beside {formatted(self.transferred.allocated)} that this rank has there already, and "
                f"{_free_space(self._fd)} are free. Make space, or use another directory."
            ) from error
        tensor = torch.frombuffer(memory, dtype=torch.uint8)
        storage = tensor.untyped_storage()
        region = _Region(name, offset, nbytes, storage.data_ptr(), weakref.ref(storage))
        with self._lock:
            self._regions[region.address] = region
            self.transferred.allocated += nbytes
        # `memory` is gone when the storage is, which refers to it. Until then the store is there.
        weakref.finalize(memory, self._forget, region).atexit = False
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
        future = self._reader.submit(self._read, found)
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
        with self._lock:
            while self._unfinished and self._unfinished[0].done():
                self._unfinished.popleft()
            oldest = [self._unfinished.popleft() for _ in range(len(self._unfinished) - BEHIND + 1)]
        self._wait_for(set(oldest))
        self._check()
        for region, _ in found:
            region.wanted = False
        future = self._writer.submit(self._write, found)
        with self._lock:
            self._unfinished.append(future)

    def flush(self) -> None:
        """Wait for everything that was begun.

        Raises:
            DiskError: a transfer failed.
        """
        self._check()
        with self._lock:
            futures = {*self._unfinished, *(region.reading for region in self._regions.values())}
        self._wait_for({future for future in futures if future is not None})
        self._check()

    def resident_bytes(self) -> int:
        """Return how much of this store's tensors is in memory: mapped, or in the page cache."""
        alive = [(region, region.storage()) for region in list(self._regions.values())]
        return sum(paging.resident(region.address, region.nbytes) for region, storage in alive if storage is not None)

    def close(self) -> None:
        """End the threads, and close the file. Tensors stay readable, and keep their space, until they are gone."""
        if os.getpid() != self._owner:
            return
        for region in list(self._regions.values()):
            region.wanted = False  # ends what is being read
        for pool in (self._reader, self._writer):
            pool.shutdown(cancel_futures=True)
        with self._lock:
            self._end()

    def _check(self) -> None:
        if os.getpid() != self._owner:
            raise DiskError(
                f"state in {self.directory} belongs to process {self._owner}, which has forked this one: it can only be read."
            )
        if self._error is not None:
            raise DiskError(str(self._error)) from self._error
        if not self._end.alive:
            raise DiskError(f"the state in {self.directory} has been closed.")

    def _find(self, tensors: Iterable[torch.Tensor]) -> list[tuple[_Region, Any]]:
        """Return each one's region, once, with its storage: while a thread works on the mapping, it must not go."""
        found: dict[int, tuple[_Region, Any]] = {}
        for tensor in tensors:
            if tensor.numel() == 0:
                continue
            storage = tensor.untyped_storage()
            region = self._regions.get(storage.data_ptr())
            if region is None or region.storage() is not storage:
                raise ValueError(
                    f"a tensor of shape {tuple(tensor.shape)} was not allocated by the store in {self.directory}"
                )
            found[region.address] = region, storage
        return list(found.values())

    def _wait_for(self, futures: set[Future[None]]) -> None:
        if not all(future.done() for future in futures):
            began = time.perf_counter()
            all_done(futures)  # they raise nothing: errors are kept
            with self._lock:
                self.transferred.waited += time.perf_counter() - began

    # -- the file -------------------------------------------------------------------------------------------------
    def _take(self, extent: int) -> tuple[int, bool]:
        """Return where there is place for a region, and whether it holds zeros."""
        with self._lock:
            if free := self._free.get(extent):
                return free.pop()
            self._size += extent
            return self._size - extent, True

    def _give_back(self, offset: int, extent: int) -> None:
        """Free the space of a region, which is mapped no more."""
        with self._lock:  # while it is held, the number is that of the file
            if self._end.alive:
                is_zero = paging.punch(self._fd, offset, extent)
                self._free.setdefault(extent, []).append((offset, is_zero))

    def _forget(self, region: _Region) -> None:
        """Nothing views the region any more. Runs in any thread, also within this module's own code."""
        if os.getpid() != self._owner:
            paging.unmap(region.address, region.nbytes)
            return
        with self._lock:
            del self._regions[region.address]  # first: the next one may be mapped at this place
            self.transferred.allocated -= region.nbytes
        paging.unmap(region.address, region.nbytes)
        self._give_back(region.offset, region.extent)

    # -- in the background ----------------------------------------------------------------------------------------
    def _read(self, found: list[tuple[_Region, Any]]) -> None:
        for region in _each(found):
            try:
                if paging.fetch(region.address, region.nbytes, go_on=lambda region=region: region.wanted):  # type: ignore[misc]
                    with self._lock:
                        self.transferred.read += region.nbytes
            except Exception as error:
                self._fail(f"{region.name!r} can't be read from disk", error)

    def _write(self, found: list[tuple[_Region, Any]]) -> None:
        for region in _each(found):
            try:
                if not region.wanted:
                    # First: some file systems learn only by it which pages were changed.
                    paging.unmap_pages(region.address, region.nbytes)
                for pause in _PAUSES:
                    time.sleep(pause)
                    paging.write_out(self._fd, region.offset, region.nbytes)
                    if region.wanted or self.in_memory:
                        break
                    paging.drop(self._fd, region.offset, region.extent)
                    if not paging.resident(region.address, region.nbytes):
                        break
                with self._lock:
                    self.transferred.written += region.nbytes
            except Exception as error:
                self._fail(f"{region.name!r} can't be written to disk", error)

    def _fail(self, what: str, error: Exception) -> None:
        reason = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
        failure = DiskError(
            f"rank {self.rank}: {what}: {reason}. What was changed since may be lost: restart from a checkpoint, with another "
            "directory for nvme=."
        )
        failure.__cause__ = error
        with self._lock:
            self._error = self._error or failure


def _each(found: list[tuple[_Region, Any]]) -> Iterator[_Region]:
    """Yield the regions, one by one; each is let go of when its turn is over."""
    found.reverse()
    while found:
        yield found[-1][0]
        found.pop()


def _open_unnamed(directory: Path) -> int:
    try:
        return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.EISDIR):
            raise
    fd, path = tempfile.mkstemp(prefix="torch-shard-", dir=directory)  # a file system that has only files with names
    os.unlink(path)
    return fd


def _free_space(fd: int) -> str:
    found = os.fstatvfs(fd)
    return formatted(found.f_bavail * found.f_frsize)


def _lies_in_memory(fd: int) -> bool:
    device = os.fstat(fd).st_dev
    number = f"{os.major(device)}:{os.minor(device)}"
    mounts = [line.split(" ") for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return any(mount[2] == number and mount[mount.index("-") + 1] in ("tmpfs", "ramfs") for mount in mounts)
