"""The version of one model's shards on this rank, and the lock between changes and readers of them."""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Literal, NamedTuple

import torch

from ...errors import MissingRankError
from ..streams import streams_of
from ..work import caller_line
from .edits import Edits

CHANGED = "goes on after "  # the beginning of the operation that notes a version

_OPTIMIZERS = 3  # optimizers that a message names
_LOOK = 0.2  # seconds between two looks at what this rank waits for


class Admission(NamedTuple):
    """The answer to a reader that wants to read one version of the shards.

    Attributes:
        outcome: "admitted"; "ahead" if the shards have changed since that version, or are changing; "behind" if they have not
            reached it in time; "stuck" if they never will, since this rank waits for the reader in something else.
        finished: how many changes have made the version that the shards have.
        line: the line of user code that has made the latest one, or makes one now.
        before: the reader wants the shards as they were before the edits that may be taken back.
    """

    outcome: Literal["admitted", "ahead", "behind", "stuck"]
    finished: int
    line: str
    before: bool = False


class Versions:
    """The count of changes of a model's shards: optimizer steps, edits and loads.

    All ranks make the same changes, so that equal counts mean one version of the model. Edits whose values are known in full are
    not counted, but named by these values, since one rank alone may make them and take them back (:class:`.Edits`). A change
    waits while readers are admitted, and a reader is admitted between changes only. Changes are made by one thread; readers are
    served by others.

    Attributes:
        restarts: how often changes were counted anew, see :meth:`restart`.
        finished: how many changes have ended since then.
        edits: the edits since the latest of these changes.
        tracks_edits: True if one rank alone may make edits; otherwise edits are changes like all others.
        changed: True if there was any change since the shards exist.
        line: the line of user code that has made the latest change, or makes one now.
        event: recorded on the stream of the latest change, for streams that read; None before it, and on the CPU.
    """

    def __init__(self, device: torch.device, rank: int, seconds: float, tracks_edits: bool) -> None:
        """Begin with the first version. `rank` is this rank, for messages; a change waits for readers for at most `seconds`."""
        self._rank, self._seconds = rank, seconds
        self._streams = streams_of(device)
        self.event: Any = None
        self._state = threading.Condition()
        self._readers: set[object] = set()
        self._depth = 0  # running changes, of which the outermost counts
        self._edits_only = False  # the running change is noted in `edits`
        self._dirty = False  # the running change has changed something already
        # Waits for ranks that may still come to read the present version.
        self.settle: Callable[[], None] = lambda: None
        self.line = "the start"
        self.restarts = self.finished = 0
        self._stepped: dict[int, str] = {}  # the sets of parameters over which optimizers have stepped, by checksum
        self._steps, self._of = 0, ""  # a checksum of these, and their text
        self.edits = Edits()
        self.tracks_edits = tracks_edits
        self.changed = False

    @property
    def present(self) -> tuple[int, int, int]:
        """A value that differs between any two versions of this rank's shards, except for edits whose values are known."""
        return self.restarts, self.finished, self.edits.base

    @property
    def _count(self) -> tuple[int, int]:
        return self.restarts, self.finished

    @property
    def changing(self) -> bool:
        """True while the shards are being changed."""
        return self._depth > 0

    # -- changes ------------------------------------------------------------------------------------------------
    def begin_change(self, edits: bool = False) -> None:
        """Wait until nobody reads, and admit no reader from now on. Calls may be nested.

        Args:
            edits: True if the change will be noted in :attr:`edits`. Readers of the values before it may then still come.

        Raises:
            MissingRankError: a read has not ended within the time that process groups wait; nothing has changed.
        """
        if not self._depth:
            line = caller_line()
            if not edits:
                self.settle()
            with self._state:
                if not self._state.wait_for(lambda: not self._readers, self._seconds):
                    raise MissingRankError(
                        f"rank {self._rank} waited {self._seconds:g} s at {line} to change parameters, which another rank still "
                        "reads, perhaps inside engine.gathered() with a barrier in it. Leave gathered() before the barrier."
                    )
                self._depth, self._edits_only, self.line = 1, edits, line
        else:
            self._depth += 1

    def end_change(self) -> None:
        """End the change that :meth:`begin_change` has begun; the outermost one makes a new version."""
        if self._depth > 1:
            self._depth, self._dirty = self._depth - 1, True
        elif self._depth:
            self._end()

    @contextmanager
    def change(self, edits: bool = False) -> Iterator[None]:
        """Return a context in which the shards are changed; `edits` is the argument of :meth:`begin_change`."""
        self.begin_change(edits)
        try:
            yield
        except BaseException:
            self._edits_only = False  # some may have been made
            raise
        finally:
            self.end_change()

    def pause_change(self) -> None:
        """Admit readers although a change has begun, which now waits for something. What it has changed so far is a version."""
        if self._dirty:
            self._end()
            return
        with self._state:
            self._depth = 0
            self._state.notify_all()

    def note_part(self) -> None:
        """Note that the running change has changed something already, which :meth:`pause_change` counts."""
        self._dirty = self._depth > 0

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
            self.restarts, self.finished = self.restarts + 1, 0
            self._stepped, self._steps, self._of = {}, 0, ""
            self.edits.forget()
            self._state.notify_all()

    def agreed(self) -> None:
        """Note that all ranks have this version: they have made the same edits, and none will take them back alone."""
        if self.edits.before:
            with self._state:
                self.edits.close()

    def _end(self) -> None:
        self.event = self._streams.record()
        with self._state:
            if not (self._edits_only and self._depth):
                self.edits.close()
                self.finished += 1
            self._depth, self._dirty, self._edits_only, self.changed = 0, False, False, True
            self._state.notify_all()

    def note_optimizer(self, names: Iterable[str]) -> None:
        """Note that an optimizer steps the parameters of these names, which :meth:`note` compares with those of other ranks.

        Neither the order of names nor that of optimizers counts, nor how many optimizers step the same parameters.
        """
        every = sorted(set(names))
        code = zlib.crc32("\n".join(every).encode())
        if not every or code in self._stepped:
            return
        self._stepped[code] = f"{len(every)} parameters from {every[0]} to {every[-1]}"
        self._steps ^= code
        few = sorted(self._stepped.values())[:_OPTIMIZERS]
        self._of = f", with optimizers of {', '.join(few)} (checksum {self._steps:08x})"

    def note(self) -> tuple[int, str]:
        """Return the present version as an operation to note, by which ranks find that one has made other changes."""
        text = f"{CHANGED}{self.finished} changes of the parameters, the latest at {self.line}{self._of}"
        return self.finished ^ self.restarts << 20 ^ self.edits.digest << 24 ^ self._steps << 28, text

    # -- readers ------------------------------------------------------------------------------------------------
    def admit(
        self, reader: object, count: tuple[int, int], digest: int, seconds: float, waits_for_it: Callable[[], bool]
    ) -> Admission:
        """Admit a reader of one version, once the shards have reached it, for at most `seconds`.

        Args:
            reader: any object.
            count, digest: the version: :attr:`restarts` and :attr:`finished`, and :attr:`.Edits.digest` or :attr:`.Edits.base`.
            seconds: the longest time to wait.
            waits_for_it: returns True if this rank now waits for the reader's rank, so that it can't reach the version first.
        """
        deadline, edits = time.monotonic() + seconds, self.edits
        with self._state:
            while self._count < count or (
                self._count == count and (self._edits_only or digest not in (edits.base, edits.digest))
            ):
                left = deadline - time.monotonic()
                if left <= 0 or waits_for_it():
                    return Admission("behind" if left <= 0 else "stuck", self.finished, self.line)
                self._state.wait(min(left, _LOOK))
            if self._count > count or self._depth:
                return Admission("ahead", self.finished, self.line)
            self._readers.add(reader)
            return Admission("admitted", self.finished, self.line, digest != edits.digest)

    def dismiss(self, reader: object) -> None:
        """End the reads of a reader, if it was admitted."""
        with self._state:
            self._readers.discard(reader)
            self._state.notify_all()
