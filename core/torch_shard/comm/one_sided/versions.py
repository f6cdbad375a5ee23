"""The version of one model's shards on this rank, and the lock between changes and readers of them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal

import torch

from ...errors import MissingRankError
from ..work import caller_line

__all__ = ["CHANGED", "Admission", "Versions"]

CHANGED = "goes on after "  # the beginning of the operation that notes a version

_LOOK = 0.2  # seconds between two looks at what this rank waits for


@dataclass(frozen=True)
class Admission:
    """The answer to a reader that wants to read one version of the shards.

    Attributes:
        outcome: "admitted"; "ahead" if the shards have changed since that version, or are changing; "behind" if they have not
            reached it in time; "stuck" if they never will, since this rank waits for the reader in something else.
        finished: the version that the shards have.
        line: the line of user code that has made the latest change, or makes one now.
    """

    outcome: Literal["admitted", "ahead", "behind", "stuck"]
    finished: int
    line: str


class Versions:
    """Counts the changes of a model's shards: optimizer steps, edits and loads.

    All ranks make the same changes, so that equal counts mean one version of the model. A change waits while readers are
    admitted, and a reader is admitted between changes only. Changes are made by one thread; readers are served by others.

    Attributes:
        finished: how many changes have ended.
        changed: whether there was any since the shards exist.
        line: the line of user code that has made the latest change, or makes one now.
        event: on a CUDA device, recorded on the stream of the latest change, for streams that read; else None.
    """

    def __init__(self, device: torch.device, rank: int, seconds: float) -> None:
        """`rank`: this rank, for messages; `seconds`: how long a change waits for readers."""
        self._rank, self._seconds = rank, seconds
        self._on_cuda = device.type == "cuda"
        self.event: Any = None
        self._state = threading.Condition()
        self._readers: set[object] = set()
        self._depth = 0  # running changes, of which the outermost counts
        self._dirty = False  # a change inside the running one has ended
        self.settle: Callable[[], None] = lambda: (
            None
        )  # waits for ranks that may still come to read the present version
        self.line = "the start"
        self.finished = 0
        self.changed = False

    @property
    def changing(self) -> bool:
        """True while the shards are being changed."""
        return self._depth > 0

    # -- changes ------------------------------------------------------------------------------------------------
    def begin_change(self) -> None:
        """Wait until nobody reads, and admit no reader from now on. Calls may be nested.

        Raises:
            MissingRankError: a read has not ended within the time that process groups wait; nothing has changed.
        """
        if not self._depth:
            line = caller_line()
            self.settle()
            with self._state:
                if not self._state.wait_for(lambda: not self._readers, self._seconds):
                    raise MissingRankError(
                        f"rank {self._rank} waited {self._seconds:g} s at {line} to change parameters, which another rank still "
                        "reads, perhaps inside engine.gathered() with a barrier in it. Leave gathered() before the barrier."
                    )
                self._depth, self.line = 1, line
        else:
            self._depth += 1

    def end_change(self) -> None:
        """End the change that :meth:`begin_change` has begun; the outermost one makes a new version."""
        if self._depth > 1:
            self._depth, self._dirty = self._depth - 1, True
        elif self._depth:
            self._end()

    @contextmanager
    def change(self) -> Iterator[None]:
        """Return a context in which the shards are changed."""
        self.begin_change()
        try:
            yield
        finally:
            self.end_change()

    def pause_change(self) -> None:
        """Admit readers although a change has begun: it waits for something. What it has changed so far is a version."""
        if self._dirty:
            self._end()
            return
        with self._state:
            self._depth = 0
            self._state.notify_all()

    def note_change(self) -> None:
        """Count a change that has been made, by an operation that all ranks take part in; end a running one."""
        if not self._depth:
            self.line = caller_line()
        self._end()

    def abandon_change(self) -> None:
        """End a change that was left by an exception, say of an optimizer's step; what it has changed so far counts."""
        if self._depth:
            self._end()

    def restart(self) -> None:
        """Count anew, after changes that may differ between the ranks.

        Call on all ranks when they have one version, or load one, and before another collective: a rank that reads alone must
        find that the others have counted anew, too.
        """
        with self._state:
            self.finished = 0
            self._state.notify_all()

    def _end(self) -> None:
        if self._on_cuda:
            self.event = torch.cuda.Event()
            self.event.record()
        with self._state:
            self._depth, self._dirty, self.changed = 0, False, True
            self.finished += 1
            self._state.notify_all()

    def note(self) -> tuple[int, str]:
        """Return the present version as an operation to note, by which ranks find that one has made other changes."""
        return self.finished, f"{CHANGED}{self.finished} changes of the parameters, the latest at {self.line}"

    # -- readers ------------------------------------------------------------------------------------------------
    def admit(self, reader: object, version: int, seconds: float, waits_for_it: Callable[[], bool]) -> Admission:
        """Admit a reader of `version`, once the shards have reached it, for at most `seconds`.

        Args:
            waits_for_it: whether this rank now waits for the reader's rank, so that it makes no more changes until then.
        """
        deadline = time.monotonic() + seconds
        with self._state:
            while self.finished < version:
                left = deadline - time.monotonic()
                if left <= 0 or waits_for_it():
                    return Admission("behind" if left <= 0 else "stuck", self.finished, self.line)
                self._state.wait(min(left, _LOOK))
            if self.finished > version or self._depth:
                return Admission("ahead", self.finished, self.line)
            self._readers.add(reader)
            return Admission("admitted", self.finished, self.line)

    def dismiss(self, reader: object) -> None:
        """End the reads of a reader, if it was admitted."""
        with self._state:
            self._readers.discard(reader)
            self._state.notify_all()
