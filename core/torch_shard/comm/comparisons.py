"""The all-reduce in which ranks compare their operations, and how a rank that only reads leaves it to read alone.

A rank that waits here to *read* the model (a forward without gradients, a state dict) may find that a partner does something
else. It then goes on alone and leaves the all-reduce behind, which is still under way. What must never happen is that some
ranks believe all to have come, and begin collectives, while another reads alone. So the reader first asks a partner that has
not come yet (:mod:`.one_sided.service`), and that partner promises to say so when it comes: a flag in its own message, which
reaches all ranks with the result. One promise suffices, because without that partner the all-reduce does not end.

No message is added where no rank reads alone, and nothing is agreed upon through a third place.
"""

from __future__ import annotations

import contextlib
import enum
import sys
import threading
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from ..errors import MissingRankError, ShardError
from ..utils.autograd_private import outside_saved_tensors_hooks
from .work import Pending

if TYPE_CHECKING:
    from .one_sided.partners import Partners
    from .one_sided.service import Service
    from .watchdog import Watchdog


class Purpose(enum.IntEnum):
    """The purpose with which a rank comes to a comparison. Each has a flag in the message."""

    READS = 1
    """The rank reads the model, and reads alone where others do something else, or are late."""
    RECORDS = 2
    """The rank reads the model for a graph.

    A backward through a value that was read alone is an error. So this rank reads alone only if the others certainly do
    something else, and never merely because they are late.
    """
    WORKS = 3
    """The rank runs an operation that concerns all ranks."""


_LEFT = 0
"""The flag of a comparison that some rank has left to read alone."""
FLAGS = 4
"""The bytes of a message that belong to this module, after the hashes."""

_SOON = 0.003  # seconds within which partners that do the same usually come
_LOOK = 0.02  # seconds between two looks at a partner that has not come


class Comparisons:
    """The comparisons of all engines over one set of process groups.

    Attributes:
        service: the service of this rank; None if there is no other rank.
        partners: the connections to the other ranks' services.
    """

    def __init__(self) -> None:
        self.service: Service | None = None
        self.partners: Partners | None = None
        self._left: Pending | None = None  # the all-reduce that this rank has left behind to read alone
        self._owed = 0  # the number of a comparison, or a higher one, that late ranks may still come to, see `settle`
        # The comparison that `begin` has sent, and the function to call at its end; see there.
        self._unfinished: tuple[Pending, Callable[[bool, bool], None]] | None = None
        self._finishing = threading.RLock()
        self._error: Exception | None = None  # why it has failed: a partner has destroyed its process groups

    def served(self) -> float:
        """Return the time, by ``time.monotonic()``, at which this rank has last served a rank that reads alone.

        Such a rank is worth waiting for: it comes when it has read.
        """
        return 0.0 if self.service is None else self.service.served

    def all_reduce(
        self,
        watchdog: Watchdog,
        message: torch.Tensor,
        flags: torch.Tensor,
        what: str,
        purpose: Purpose,
        alone_after: float,
    ) -> bool:
        """Replace `message`, uint8, by its maximum over all ranks. Collective, unless this returns False.

        Args:
            watchdog: the watchdog of the engine.
            message: the message.
            flags: the part of `message` that belongs to this module.
            what: the name of the operation, for error messages.
            purpose: what this rank comes for.
            alone_after: seconds after which a rank that :attr:`Purpose.READS` does not wait for a partner that computes.

        Returns:
            False if this rank has left before the others came, and reads alone.
        """
        reads = purpose is not Purpose.WORKS
        if self._left is not None:
            if purpose is Purpose.READS and not self._left.done():
                return False
            # A partner may never come to what this rank has left, since its script has ended, for example.
            if purpose is Purpose.RECORDS and not self._come(self._left, purpose, alone_after, watchdog.timeout):
                return False
            self._end_left(what)
        if self._error is not None and reads:
            return False
        try:
            pending = self._issue(watchdog, message, flags, what, purpose)
        except (RuntimeError, ValueError) as error:
            if not reads or isinstance(error, ShardError):
                raise
            self._error = error  # this rank has destroyed the process groups: nobody can be met any more
            return False
        if not reads or self.service is None or self._come(pending, purpose, alone_after, watchdog.timeout):
            pending.wait()
            return True
        if self._error is None:
            self._left, self._owed = pending, pending.number
        return False

    def _issue(
        self, watchdog: Watchdog, message: torch.Tensor, flags: torch.Tensor, what: str, purpose: Purpose
    ) -> Pending:
        """Send this rank's message."""
        if self._error is not None:
            raise self._error
        service, channel = self.service, watchdog.channels["control"]
        if service is None:
            number = channel.count()
        else:
            with service.lock:
                number = service.issued = channel.count()
                service.reads = purpose is Purpose.READS
                if purpose is Purpose.WORKS:
                    service.joined = number
                flags[_LEFT] = service.promised >= number
        flags[purpose] = 1
        work = outside_saved_tensors_hooks(
            dist.all_reduce, message, op=dist.ReduceOp.MAX, group=channel.group, async_op=True
        )
        channel.groups.buffers[work] = message
        return Pending(watchdog, channel, number, what, work)

    def met(self) -> None:
        """Note that all ranks have come to one operation, none of them to go on alone."""
        if self.service is not None:
            self.service.met()

    # -- a comparison that is under way while this rank goes on -------------------------------------------------
    def begin(
        self,
        watchdog: Watchdog,
        message: torch.Tensor,
        flags: torch.Tensor,
        what: str,
        then: Callable[[bool, bool], None],
    ) -> None:
        """Send the message of a rank that :attr:`Purpose.WORKS`, and don't wait: :meth:`finish` does. Collective.

        An all-reduce that this rank left in order to read alone may still be in flight, because other ranks may come to it only
        after this rank goes on.

        Args:
            watchdog, message, flags, what: the arguments of :meth:`all_reduce`.
            then: a function, which is called once all ranks have come, with True, or with False if that fails. Its second
                argument is that of :meth:`finish`.
        """
        self._unfinished = self._issue(watchdog, message, flags, what, Purpose.WORKS), then

    def finish(self, *, only_if_known: bool = False, repeats: bool = True) -> bool:
        """End the comparison that :meth:`begin` has begun, if there is one.

        Args:
            only_if_known: leave it under way if some ranks have not come yet.
            repeats: if it has to be repeated, wait for the repetition, too, rather than only begin it.

        Returns:
            True if there was one, which has ended.

        Raises:
            DivergenceError: the ranks have come to different operations.
        """
        with self._finishing:  # another thread that reads a gradient may be at it
            if self._unfinished is None or (only_if_known and not self._unfinished[0].done()):
                return False
            (pending, then), self._unfinished = self._unfinished, None
            try:
                if self._left is not None:
                    self._end_left(pending.what)
                pending.wait()
            except BaseException:
                then(False, repeats)
                raise
            then(True, repeats)
            return True

    def finish_for(self, purpose: Purpose, alone_after: float, seconds: float) -> bool:
        """End the comparison that :meth:`begin` has begun, before one for which this rank comes with `purpose`.

        If a rank read alone during that comparison, it has to be repeated. A partner learns this only when it looks at the
        result, and may do something else first. A rank that comes to read therefore waits neither for that comparison nor for
        its repetition; all ranks compare again later.

        Returns:
            False if this rank reads alone, while that comparison is still under way.
        """
        reads = purpose is not Purpose.WORKS and self.service is not None
        while reads and (unfinished := self._unfinished) is not None:
            if not self._come(unfinished[0], purpose, alone_after, seconds):
                self._owed = sys.maxsize
                return False
            self.finish(repeats=False)
        self.finish()
        return True

    def _end_left(self, what: str) -> None:
        """Wait for the all-reduce that this rank has left, since it is back for `what`."""
        assert self._left is not None
        left, self._left = self._left, None
        left.what = what
        try:
            left.wait()
        except MissingRankError as error:
            self._error = error

    def owe(self) -> None:
        """Note that this rank reads alone without a comparison: :meth:`settle` here and elsewhere waits for all such readers."""
        service = self.service
        if service is not None:
            with service.lock:
                self._owed, service.reads = max(self._owed, service.issued), True

    def settle(self, seconds: float) -> None:
        """Wait for at most `seconds` for late ranks that may still come to a read which this rank has made alone.

        It is called before this rank changes the model, because those ranks would find another version afterwards. Not
        collective, but it ends what :meth:`begin` has begun.
        """
        self.finish()
        owed, self._owed = self._owed, 0
        if self.partners is None or self.service is None:
            return
        owed = min(owed, self.service.issued)
        self.service.reads = False  # this rank reads the present version no more
        if not owed:
            return
        deadline = time.monotonic() + seconds
        with contextlib.suppress(MissingRankError):  # a rank that is gone does not come
            for rank in range(len(self.partners)):
                place = ""
                while rank != self.partners.rank and time.monotonic() < deadline:
                    found = self.partners.ask(rank, ask="presence")
                    reads = found["reads"]  # perhaps the first of several that this rank has made already
                    came = found["issued"] > owed and not reads
                    stays = found["place"] == place != "" and not (reads and place.startswith("torch_shard."))
                    if came or stays or found["left"] or rank in self.service.awaited:
                        break
                    place = found["place"]
                    time.sleep(_LOOK)

    def _come(self, pending: Pending, purpose: Purpose, alone_after: float, seconds: float) -> bool:
        """Wait until the other ranks have come; return False once one has promised to report that this rank reads alone.

        Return True after `seconds`, too, because the wait that follows explains who has not come.
        """
        begin, pause = time.monotonic(), _SOON
        assert self.partners is not None and self.service is not None
        missing = [rank for rank in range(len(self.partners)) if rank != self.partners.rank]
        places: dict[int, str] = {}
        while missing and time.monotonic() < begin + seconds:
            try:
                if self._error is None and pending.wait_at_most(pause):
                    pending.work.wait()  # a collective that has failed counts as ended
                    return True
            except (MissingRankError, RuntimeError) as error:  # a partner has destroyed its process groups, or is gone
                self._error = error
            pause = _LOOK
            sure = purpose is Purpose.RECORDS
            late = (not sure and time.monotonic() > begin + alone_after) or self._error is not None
            for rank in list(missing):
                place = places.get(rank, "")
                # A rank does not come, either, while it waits for a change that this rank makes only after this read.
                insist = late or rank in self.service.awaited
                known = {"insist": insist, "sure": sure, "place": place, "issued": pending.channel.groups.issued}
                answer = self.partners.ask(rank, ask="whereabouts", comparison=pending.number, **known)
                places[rank] = answer["place"]
                if answer["state"] == "away":
                    return False
                if answer["state"] == "here":
                    missing.remove(rank)
        if self._error is not None:
            raise self._error
        return True
