"""A save that goes on in a thread of each rank while training does."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from pathlib import Path

from ...errors import CheckpointError
from ...log import logger


class PendingSave:
    """The object that ``engine.save(..., asynchronous=True)`` returns. Its methods are not collective.

    The thread is no daemon, so that a program that ends waits for it. The thread is never joined, because Python takes a thread
    for ended when a join of it is interrupted.

    Attributes:
        path: the path of the checkpoint.
        failure: the text of what went wrong; None once the checkpoint is there. Code that may run only after a good save asks
            here, since someone else may have waited and got the error, which is raised once.
    """

    def __init__(
        self,
        target: Path,
        save: Callable[[], CheckpointError | None],
        alive: contextlib.AbstractContextManager[None],
    ) -> None:
        """Start the thread, which waits for :meth:`begin`.

        Args:
            target: the path of the checkpoint.
            save: writes the checkpoint together with the other ranks, and returns what went wrong on any of them.
            alive: sends this rank's heartbeat. Entered here, since a program that is about to end starts no threads.
        """
        self.path = target
        self._save: Callable[[], CheckpointError | None] | None = save
        self._error: CheckpointError | None = None
        self.failure: str | None = f"the save to {target} was not carried out."
        self._may_begin, self._ended = threading.Event(), threading.Event()
        with contextlib.ExitStack() as stack:
            stack.enter_context(alive)
            threading.Thread(target=self._run, name=f"torch_shard save of {target.name}").start()
            self._alive = stack.pop_all()

    def begin(self) -> None:
        """Begin to write. Call it when all ranks have a thread."""
        self._may_begin.set()

    def cancel(self) -> None:
        """End the thread without writing, because a rank has none."""
        self._save = None
        self._may_begin.set()
        self._ended.wait()

    def done(self) -> bool:
        """Return True if the checkpoint is there, or has failed."""
        return self._ended.is_set()

    def wait(self) -> None:
        """Return when the checkpoint is there, on all ranks.

        Raises:
            CheckpointError: the save has failed. Raised once: the next save, load or close does not raise it again. It is not
                kept, because it would hold the frames that it has passed.
        """
        self._ended.wait()
        error, self._error = self._error, None
        if error is not None:
            raise error

    def _run(self) -> None:
        self._may_begin.wait()
        try:
            with self._alive:
                if self._save is not None:
                    self._error = self._save()
                    self.failure = None if self._error is None else str(self._error)
            if self._error is not None:  # logged, since the user may not wait
                logger.error("%s", self._error)
        finally:
            self._save = None  # frees the copies of what was saved
            self._ended.set()
