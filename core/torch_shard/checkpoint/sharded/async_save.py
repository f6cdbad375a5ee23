"""A save that goes on while training does: a thread on each rank, and what all of them make of it."""

from __future__ import annotations

import contextlib
import dataclasses
import pickle
import threading
from pathlib import Path
from typing import Any, Protocol

from ...comm.heartbeat_barrier import HeartbeatBarrier
from ...errors import CheckpointError
from ...log import logger

__all__ = ["PendingSave"]


class Save(Protocol):
    """A save of which this rank holds a snapshot."""

    proposal: Any
    """What this rank could write."""

    def decide(self, proposals: list[Any]) -> list[Any]:
        """Return what each rank writes. On rank 0."""

    def write(self, plan: Any) -> Any:
        """Write it; what this returns goes to rank 0."""

    def finish(self, parts: list[Any]) -> None:
        """Make the checkpoint appear, from what all ranks returned. On rank 0."""

    def close(self, done: bool) -> None:
        """Close, with whether the checkpoint is there. On every rank, in the end."""


class PendingSave:
    """What ``engine.save(..., asynchronous=True)`` returns. Its methods are not collective.

    The thread is no daemon: a program that ends waits for it. Nothing here joins it, since a join that is interrupted makes
    Python take the thread for ended.
    """

    def __init__(self, target: Path, barrier: HeartbeatBarrier | None, save: Save) -> None:
        """Start the thread, which waits for :meth:`begin`.

        Args:
            target: of the checkpoint, for messages.
            barrier: of the ranks; None where there is one.
            save: what there is to do.
        """
        self.path = target
        self._work: _Work | None = _Work(barrier, save)
        self._error: CheckpointError | None = None
        self._may_begin, self._ended = threading.Event(), threading.Event()
        self._living = contextlib.ExitStack()
        if barrier is not None:  # here, since a program that is about to end starts no threads
            self._living.enter_context(barrier.heartbeat())
        try:
            threading.Thread(target=self._run, name=f"torch_shard save of {target.name}").start()
        except BaseException:
            self._living.close()
            raise

    def begin(self) -> None:
        """Begin to write: all ranks have a thread."""
        self._may_begin.set()

    def cancel(self) -> None:
        """Don't begin: a rank has none."""
        self._work = None
        self._may_begin.set()
        self._ended.wait()

    def done(self) -> bool:
        """Return True if the checkpoint is there, or has failed."""
        return self._ended.is_set()

    def wait(self) -> None:
        """Return when the checkpoint is there, on all ranks.

        Raises:
            CheckpointError: it has failed. Raised once: the next save, load or close does not raise it again.
        """
        self._ended.wait()
        error, self._error = self._error, None
        if error is not None:
            raise error

    # -- in the thread ------------------------------------------------------------------------------------------
    def _run(self) -> None:
        self._may_begin.wait()
        try:
            with self._living:
                self._error = None if self._work is None else self._outcome(self._work)
        finally:
            self._work = None  # with it go the copies of what was saved
            self._ended.set()

    def _outcome(self, work: _Work) -> CheckpointError | None:
        try:
            problem = work.together() if work.barrier is not None else work.alone()
        except Exception as error:  # the store is gone, or a rank
            problem = _text(error)
        work.save.close(problem is None)
        if problem is None:
            return None
        failure = CheckpointError(
            f"the asynchronous save to {self.path} failed: {problem} If there is a checkpoint at that path, it is whole. The "
            "state that was to be saved is gone; save again."
        )
        # The next call may never come.
        logger.error("%s", failure)
        return failure


@dataclasses.dataclass(frozen=True)
class _Work:
    """What a :class:`PendingSave` does, and with whom."""

    barrier: HeartbeatBarrier | None
    save: Save

    def alone(self) -> str | None:
        """Save. None, or what went wrong."""
        try:
            (plan,) = self.save.decide([self.save.proposal])
            self.save.finish([self.save.write(plan)])
        except Exception as error:
            return _text(error)
        return None

    def together(self) -> str | None:
        """Save, and learn what became of it: None, or what went wrong on any rank."""
        barrier = self.barrier
        assert barrier is not None
        barrier.post("proposal", pickle.dumps(self.save.proposal))
        if barrier.rank:
            plan = pickle.loads(barrier.read(f"plan of rank {barrier.rank}", 0))
            if plan is not None:
                barrier.post("written", pickle.dumps(self._written(plan)))
            problem: str | None = pickle.loads(barrier.read("outcome", 0))
            barrier.forget()
            barrier.post("heard")
            return problem
        everyone = range(barrier.world)
        plans: list[Any] = [None] * barrier.world
        try:
            plans = self.save.decide([pickle.loads(barrier.read("proposal", rank)) for rank in everyone])
            problem = None
        except Exception as error:
            problem = _text(error)
        for rank in everyone[1:]:
            barrier.post(f"plan of rank {rank}", pickle.dumps(plans[rank]))
        if problem is None:
            problem = self._completed(plans[0])
        barrier.post("outcome", pickle.dumps(problem))
        # The store may end with this process.
        with contextlib.suppress(Exception):
            barrier.wait("heard", list(everyone[1:]))
            barrier.forget("written", "heard")
        return problem

    def _written(self, plan: Any) -> tuple[str | None, Any]:
        """Write this rank's part; return what went wrong, and the part."""
        assert self.barrier is not None
        try:
            return None, self.save.write(plan)
        except Exception as error:
            return f"rank {self.barrier.rank}: {_text(error)}", None

    def _completed(self, plan: Any) -> str | None:
        """Write rank 0's part, and put all parts together. Return None, or what went wrong on any rank."""
        assert self.barrier is not None
        try:
            others = range(1, self.barrier.world)
            written = [self._written(plan), *(pickle.loads(self.barrier.read("written", rank)) for rank in others)]
            problem = "; ".join(text for text, _ in written if text is not None) or None
            if problem is None:
                self.save.finish([part for _, part in written])
        except Exception as error:
            problem = _text(error)
        return problem


def _text(error: Exception) -> str:
    text = str(error) if isinstance(error, (CheckpointError, OSError)) else f"{type(error).__name__}: {error}"
    return text if text.endswith((".", "!", "?")) else f"{text}."
