"""The host thread: it works beside the training thread, one task after the other, in the order in which they were given."""

from __future__ import annotations

import os
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from ..comm.streams import streams_of
from ..errors import HostStepError


class TaskGroup:
    """The tasks of one step: once one has failed, the others are left undone."""

    __slots__ = ("error",)

    def __init__(self) -> None:
        self.error: BaseException | None = None


class Task:
    """A function that the host thread calls, or has called.

    Attributes:
        writes: the task may change memory.
    """

    writes = True
    __slots__ = ("_do", "_done", "error", "group", "thread")

    def __init__(self, do: Callable[[], None], group: TaskGroup, thread: HostThread) -> None:
        self._do: Callable[[], None] | None = do
        self._done = threading.Event()
        self.error: BaseException | None = None
        self.group, self.thread = group, thread

    def run(self) -> None:
        """Call the function, on the thread."""
        assert self._do is not None
        try:
            if self.group.error is None:
                self._do()
        except BaseException as error:  # raised where somebody waits
            self.group.error = error
        finally:
            self.error = self.group.error
            self._do = None  # frees the memory that the function refers to
            self._done.set()

    def finish(self) -> None:
        """Raise what this task has raised, as it is. Call this on the thread, in a task that was given after this one."""
        if self.error is not None:
            raise self.error

    def has_ended(self) -> bool:
        """Return True if :meth:`wait` would return at once, without an error."""
        return self._done.is_set() and self.error is None

    def wait(self) -> None:
        """Return when the task has ended.

        Raises:
            HostStepError: the task has failed.
        """
        if not self._done.is_set():
            if threading.get_ident() == self.thread.ident:
                raise AssertionError("the host thread waits for itself")
            self._done.wait()
        if self.error is not None:
            raise self.thread.failed(self.error)


class Later(Task):
    """A task that is put off until a thread waits for it, or until another task finishes it (:meth:`finish`)."""

    __slots__ = ()

    def begin(self) -> None:
        """Give the task to the thread, after all that were given before. May be called again."""
        if not self._done.is_set():
            self.thread.put(self)

    def run(self) -> None:
        # One thread runs all tasks, so that no other thread is in the middle of it.
        if not self._done.is_set():
            super().run()

    def finish(self) -> None:
        self.run()
        super().finish()

    def wait(self) -> None:
        self.begin()
        super().wait()


_running: weakref.WeakSet[HostThread] = weakref.WeakSet()
"""Host threads of this process that have been given tasks. A fork, which no thread survives, waits for their tasks."""


def _before_fork() -> None:
    for thread in list(_running):
        thread.rest()


os.register_at_fork(before=_before_fork)


class HostThread:
    """A thread for tasks. It starts with the first one, and ends with :meth:`close`, at exit, or when nothing refers to it."""

    def __init__(self, device: torch.device, failed: Callable[[BaseException], HostStepError]) -> None:
        """Start nothing yet. The tasks wait for events of `device`, and `failed` makes the error that waiters raise."""
        self._device, self.failed = device, failed
        self._pool: ThreadPoolExecutor | None = None
        self._pid = -1
        self.ident = -1

    def do(self, function: Callable[[], None], group: TaskGroup | None = None) -> Task:
        """Make the thread call `function` after all tasks that were given before."""
        task = Task(function, group or TaskGroup(), self)
        self.put(task)
        return task

    def later(self, function: Callable[[], None]) -> Later:
        """Return a task that calls `function` at the latest when a thread waits for it."""
        return Later(function, TaskGroup(), self)

    def put(self, task: Task) -> None:
        """Queue a task, after all that were given before."""
        if self._pool is None or self._pid != os.getpid():  # a forked child has no thread
            self._pid = os.getpid()
            self._pool = ThreadPoolExecutor(1, "torch-shard-host", _prepare, (self._device,))
            self.ident = self._pool.submit(threading.get_ident).result()
            _running.add(self)
        self._pool.submit(task.run)

    def rest(self) -> None:
        """Wait until all tasks have ended. What has failed is raised where its result is needed."""
        if self._pid == os.getpid() and threading.get_ident() != self.ident:
            self.do(lambda: None).wait()

    def close(self) -> None:
        """End the thread when all tasks have ended. May be called again; a later task starts a new thread."""
        if self._pool is not None and self._pid == os.getpid():
            self._pool.shutdown()
        self._pool, self._pid = None, -1


def _prepare(device: torch.device) -> None:
    """Set what torch keeps for each thread."""
    torch.set_grad_enabled(False)
    # What the thread copies to the device must not wait for all that the training thread has queued there.
    streams_of(device).enter_thread()
