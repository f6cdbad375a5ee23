"""Tensors that live in files: read ahead of their use, and written behind it.

Each tensor is a file of its own, mapped into memory and shared with the page cache. So the tensor is always exact, whoever
reads it and whenever: what is not in memory comes from the disk when it is touched. Reading ahead and writing behind change
only when the disk is waited for, and how much memory is in use::

    unit             1          2          3          4
    read_ahead    |-----|    |-----|    |-----|    |-----|                    a thread
    step                     |==|       |==|       |==|       |==|            the caller
    write_behind                 |------|   |------|   |------|  |-----|      another thread

A unit (what is passed in one call) takes memory from the beginning of its read_ahead until its write_behind has ended. Of those,
`behind` may be unfinished; a further call waits. So with one unit read ahead, ``behind + 2`` units are in memory at most.

Space is taken when a tensor is made: a full disk is an error then, and not the end of the process later. That holds where files
are overwritten in place (ext4, xfs). File systems that copy on write (btrfs, zfs) need space for each write, too; if it is
missing then, :meth:`DiskStore.wait` says so.
"""

from __future__ import annotations

import os
import re
import threading
import time
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as all_done
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch

from ..errors import DiskError
from ..log import current_rank, logger
from . import paging
from .memory_limits import formatted
from .run_folder import RunFolder

__all__ = ["DiskStore", "Transferred"]

_NAME = 80  # characters of a tensor's name that go into its file's


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
class _File:
    path: Path
    nbytes: int
    address: int
    storage: weakref.ref[Any]
    wanted: bool = False  # read ahead, and not yet written behind
    reading: Future[None] | None = None


@dataclass
class _State:
    """What the background threads share with the store: they must not keep the store itself alive."""

    error: DiskError | None = None
    transferred: Transferred = field(default_factory=Transferred)
    lock: threading.RLock = field(default_factory=threading.RLock)


class DiskStore:
    """Tensors in files of this process's own, below a directory. Not collective; safe to use from several threads.

    The files are deleted by :meth:`close`, when the store is gone or the process exits, and after a crash when the next
    store is made in the directory.

    Args:
        directory: made where it is missing. The ranks of one run may share it, two runs may not.
        run: see :class:`.RunFolder`: the same for all stores of all ranks of a run, and for no other run.
        rank: of this process; None: that of the process group or launcher.
        behind: how many calls of :meth:`write_behind` may be unfinished, at least 1.

    Raises:
        UnavailableError: this isn't Linux.
        DiskError: the directory can't be used: another run uses it, it can't be written, or its file system keeps no locks.
    """

    def __init__(
        self, directory: str | os.PathLike[str], *, run: str, rank: int | None = None, behind: int = 2
    ) -> None:
        if behind < 1:
            raise ValueError(f"behind must be at least 1, got {behind}")
        self.rank = current_rank() if rank is None else rank
        self.folder = RunFolder(directory, run, self.rank)
        self.behind = behind
        if self.folder.file_system in ("tmpfs", "ramfs"):
            logger.warning(
                "nvme=%r lies in memory (%s): nothing is saved by it", os.fspath(directory), self.folder.file_system
            )
        self._state = _State()
        self._files: dict[int, _File] = {}  # by address
        self._made = 0
        self._unfinished: deque[Future[None]] = deque()  # write_behind's
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="torch_shard disk reader")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="torch_shard disk writer")

    @property
    def path(self) -> Path:
        """The folder of this process's files."""
        return self.folder.path

    @property
    def transferred(self) -> Transferred:
        """Sums since the beginning; a live object, to read only."""
        return self._state.transferred

    def allocate(self, name: str, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A 1-D CPU tensor of zeros in a file of its own. Nothing of it is in memory until it is used.

        The file is deleted, and its space free, when the last tensor that views it is gone.

        Args:
            name: for the file's name and messages; need not be unique.
            numel: number of elements. With 0 there is no file.
            dtype: any with whole bytes.

        Raises:
            DiskError: the space can't be had: what is needed, and what is free; nothing has changed. Or: a transfer failed
                before.
        """
        self._check()
        nbytes = numel * dtype.itemsize
        if nbytes == 0:
            return torch.empty(0, dtype=dtype, device="cpu")
        with self._state.lock:
            self._made += 1
            number = self._made
        path = self.path / f"{number:06d}-{re.sub(r'[^A-Za-z0-9._-]', '_', name)[:_NAME]}"
        try:
            _take_space(path, nbytes)
            storage = torch.UntypedStorage.from_file(str(path), shared=True, nbytes=nbytes)
        except (OSError, RuntimeError) as error:
            path.unlink(missing_ok=True)
            reason = error.strerror if isinstance(error, OSError) else str(error)
            raise DiskError(
                f"rank {self.rank}: {name!r} can't be put on disk: {reason}. {path} needs {formatted(nbytes)}, beside "
                f"{formatted(self.transferred.allocated)} that this rank has there already, and {_free(self.path)} are free. "
                "Make space, or use another directory."
            ) from error
        file = _File(path, nbytes, storage.data_ptr(), weakref.ref(storage))
        with self._state.lock:
            self._files[file.address] = file
            self.transferred.allocated += nbytes
        end = weakref.finalize(storage, _forget, file, self._files, self._state, self.folder.owner)
        end.atexit = False  # the folder goes as a whole then
        return torch.empty(0, dtype=torch.uint8, device="cpu").set_(cast(torch.UntypedStorage, storage)).view(dtype)

    def read_ahead(self, tensors: Iterable[torch.Tensor], *, for_writing: bool = True) -> None:
        """Begin to read tensors that will soon be used. Returns at once.

        Args:
            tensors: of this store. A view stands for the whole tensor that was allocated.
            for_writing: they will be changed, too. Makes the first write to each page cheap; without it, tensors that
                are only read are not written again.

        Raises:
            DiskError: a transfer failed before; the message names the file. What is in the tensors stays readable.
            ValueError: a tensor is not of this store.
        """
        self._check()
        found = self._find(tensors)
        if not found:
            return
        for file, _ in found:
            file.wanted = True
        future = self._reader.submit(_read, found, self._state, self.rank, for_writing)
        for file, _ in found:
            file.reading = future

    def wait(self, tensors: Iterable[torch.Tensor]) -> None:
        """Wait until tensors that were read ahead are there. To be called before they are used.

        Without it they are just as exact, but a disk that can't be read ends the process (SIGBUS), and is an error here.

        Raises:
            As :meth:`read_ahead`.
        """
        self._check()
        self._wait_for({file.reading for file, _ in self._find(tensors) if file.reading is not None})
        self._check()

    def write_behind(self, tensors: Iterable[torch.Tensor]) -> None:
        """Begin to write tensors that were changed, and then give their memory back.

        Returns at once, unless `behind` such calls have not ended: then it waits for the oldest. The tensors may be used at any
        time, also before it has ended; those read ahead again keep their memory.

        Raises:
            As :meth:`read_ahead`.
        """
        self._check()
        found = self._find(tensors)
        if not found:
            return
        with self._state.lock:
            while self._unfinished and self._unfinished[0].done():
                self._unfinished.popleft()
            oldest = [self._unfinished.popleft() for _ in range(len(self._unfinished) - self.behind + 1)]
        self._wait_for(set(oldest))
        self._check()
        for file, _ in found:
            file.wanted = False
        future = self._writer.submit(_write, found, self._state, self.rank)
        with self._state.lock:
            self._unfinished.append(future)

    def flush(self) -> None:
        """Wait for everything that was begun.

        Raises:
            DiskError: a transfer failed.
        """
        self._check()
        with self._state.lock:
            writing = set(self._unfinished)
        self._wait_for(writing | {file.reading for file in list(self._files.values()) if file.reading is not None})
        self._check()

    def resident_bytes(self) -> int:
        """How much of this store's tensors is in memory: mapped, or in the page cache."""
        alive = [(file, file.storage()) for file in list(self._files.values())]
        return sum(paging.resident(file.address, file.nbytes) for file, storage in alive if storage is not None)

    def close(self) -> None:
        """Delete the files. Tensors stay readable, and keep their space on the disk, until they are gone. May be called twice."""
        if os.getpid() == self.folder.owner:
            for file in list(self._files.values()):
                file.wanted = False  # ends what is being read
            for pool in (self._reader, self._writer):
                pool.shutdown(cancel_futures=True)
        self.folder.close()

    def __enter__(self) -> DiskStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _check(self) -> None:
        if os.getpid() != self.folder.owner:
            raise DiskError(
                f"{self.path} belongs to process {self.folder.owner}, which has forked this one: state can be read here only."
            )
        if self._state.error is not None:
            raise DiskError(str(self._state.error)) from self._state.error
        if not self.folder.is_open:
            raise DiskError(f"the state's folder {self.path} has been closed.")

    def _find(self, tensors: Iterable[torch.Tensor]) -> list[tuple[_File, Any]]:
        """Each one's file, once, with its storage: while a thread works on the mapping, it must not go."""
        found: dict[int, tuple[_File, Any]] = {}
        for tensor in tensors:
            if tensor.numel() == 0:
                continue
            storage = tensor.untyped_storage()
            file = self._files.get(storage.data_ptr())
            if file is None or file.storage() is not storage:
                raise ValueError(
                    f"a tensor of shape {tuple(tensor.shape)} was not allocated by the store in {self.path}"
                )
            found[file.address] = file, storage
        return list(found.values())

    def _wait_for(self, futures: set[Future[None]]) -> None:
        if not all(future.done() for future in futures):
            began = time.perf_counter()
            all_done(futures)  # they raise nothing: errors are kept in the state
            with self._state.lock:
                self.transferred.waited += time.perf_counter() - began


# -- files ------------------------------------------------------------------------------------------------------------


def _take_space(path: Path, nbytes: int) -> None:
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(fd, 0, nbytes)
    finally:
        os.close(fd)


def _free(path: Path) -> str:
    try:
        found = os.statvfs(path)
    except OSError:
        return "unknown bytes"
    return formatted(found.f_bavail * found.f_frsize)


def _forget(file: _File, files: dict[int, _File], state: _State, owner: int) -> None:
    """Nothing views the file any more. Runs in any thread, also within this module's own code."""
    if os.getpid() != owner:
        return
    with state.lock:
        if files.get(file.address) is file:  # another may have been mapped at this place meanwhile
            del files[file.address]
        state.transferred.allocated -= file.nbytes
    file.path.unlink(missing_ok=True)


# -- in the background ------------------------------------------------------------------------------------------------


def _each(found: list[tuple[_File, Any]]) -> Iterator[_File]:
    """The files, one by one; each is let go of when its turn is over."""
    found.reverse()
    while found:
        yield found[-1][0]
        found.pop()


def _read(found: list[tuple[_File, Any]], state: _State, rank: int, for_writing: bool) -> None:
    for file in _each(found):
        try:
            if paging.fetch(file.address, file.nbytes, for_writing=for_writing, go_on=partial(_is_wanted, file)):
                with state.lock:
                    state.transferred.read += file.nbytes
        except Exception as error:
            _fail(state, f"rank {rank}: {file.path} can't be read", error)


def _is_wanted(file: _File) -> bool:
    return file.wanted


def _write(found: list[tuple[_File, Any]], state: _State, rank: int) -> None:
    for file in _each(found):
        try:
            fd = os.open(file.path, os.O_RDWR | os.O_CLOEXEC)
            try:
                if not file.wanted:
                    # First: some file systems learn only by it which pages were changed.
                    paging.unmap_pages(file.address, file.nbytes)
                paging.write_out(fd)
                if not file.wanted:
                    paging.drop(fd)
            finally:
                os.close(fd)
            with state.lock:
                state.transferred.written += file.nbytes
        except Exception as error:
            _fail(state, f"rank {rank}: {file.path} can't be written", error)


def _fail(state: _State, what: str, error: Exception) -> None:
    reason = error.strerror if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
    failure = DiskError(
        f"{what}: {reason}. What was changed since may be lost: restart from a checkpoint, with another directory for nvme=."
    )
    failure.__cause__ = error
    with state.lock:
        state.error = state.error or failure
