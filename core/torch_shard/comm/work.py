"""Collectives in flight: the channels that count them by purpose, and how the host waits for one of them."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch.distributed as dist

from ..errors import DivergenceError, MissingRankError
from ..utils.profiled_ranges import profiling, waiting

if TYPE_CHECKING:
    from .process_groups import ProcessGroups
    from .streams import Streams
    from .watchdog import Watchdog


_Value = TypeVar("_Value")

# Seconds that a rank waits before it posts in the store what it waits in.
FIRST_TICK = 1.0
# Seconds after which a rank whose timeout is longer logs what it waits in.
SLOW = 30.0
# Seconds at least that a rank waits for others until its first step on a device has ended. Kernels are compiled and libraries
# are loaded until then, by each rank in its own time.
FIRST_STEP = 300.0
# Seconds at most for which the rank that may serve the store stays at an error, so that all ranks can read what it says.
LEAVES = 5.0
POLL = 0.0002  # seconds between two queries of an NCCL collective
TICK = 0.5  # seconds between two reads of what the other ranks wait in; more with many ranks


def default_store() -> Any:
    """Return the store of the default process group, which works where collectives would wait."""
    return dist.distributed_c10d._get_default_store()  # no public accessor exists (torch 2.13)


# Training frameworks, which call the user's code and are called by it: an error should name a line of the user's code instead.
_FRAMEWORKS = frozenset(
    (
        "accelerate",
        "accelerate_shard",
        "lightning",
        "lightning_fabric",
        "lightning_shard",
        "lightning_utilities",
        "pytorch_lightning",
        "transformers",
    )
)


def caller_line(frame: Any = None) -> str:
    """Return the `file:line` at which the user's code waits.

    The line belongs to the innermost frame outside this package, torch, the training frameworks and Python's library. If
    there is no such frame, the innermost frame of a framework is taken. `frame`: the innermost one of another thread, in place
    of this one's.
    """
    frame = frame or sys._getframe(1)
    framework = ""
    while frame is not None:
        package = frame.f_globals.get("__name__", "").partition(".")[0]
        if package not in ("torch", "torch_shard") and package not in sys.stdlib_module_names:
            line = f"{frame.f_code.co_filename}:{frame.f_lineno}"
            if package not in _FRAMEWORKS:
                return line
            framework = framework or line
        frame = frame.f_back
    return framework or "unknown line"


class Channel:
    """A process group that is used for one purpose, by any number of engines.

    Attributes:
        purpose: "all-gather" for parameters, "reduce" for gradients and broadcasts on the device, "scalar" for what the user's
            code asks for, "control" for comparisons of what the ranks do, "message" for other messages between hosts, "host
            barrier" for the host's wait before a blocking collective.
        name: the purpose, with a suffix if the channel has not all ranks. Channels with the same name on different ranks have
            the same members, or no member in common.
        group: the process group.
        members: the numbers of its ranks among the engine's, in ascending order, which is the order of the group.
        waited: the seconds that training has waited for collectives of this channel.
    """

    def __init__(
        self,
        purpose: str,
        groups: ProcessGroups,
        members: Sequence[int],
        suffix: str = "",
        backend: str | None = None,
        shares: Channel | None = None,
    ) -> None:
        """Find the process group of the channel in `groups`, or make it. Collective over `members` if it has to be made.

        `backend` is the backend of a new process group, by default that of the user's group. With `shares` the channel uses
        the process group of that channel.
        """
        self.purpose, self.groups, self.members = purpose, groups, tuple(members)
        self.name = f"{purpose} {suffix}" if suffix else purpose
        if self.name not in groups.made:
            new = (
                shares.group
                if shares is not None
                else groups.new_group(self.name, self.members, backend or groups.backend)
            )
            groups.made[self.name] = new
        self.group: Any = groups.made[self.name]
        self.waited = 0.0
        groups.issued.setdefault(self.name, 0)

    @property
    def issued(self) -> int:
        """The number of collectives that this rank has issued on this channel, for all engines."""
        return self.groups.issued[self.name]

    def count(self) -> int:
        """Count the collective that is issued next, and return its number.

        Raises:
            DivergenceError: an earlier collective of the groups was left without a partner. The next one could pair with it
                and give wrong numbers.
        """
        self.check()
        number = self.groups.issued[self.name] = self.groups.issued[self.name] + 1
        return number

    def check(self) -> None:
        """Raise a :class:`DivergenceError` if no further collective may be issued in these groups."""
        if self.groups.broken:
            raise DivergenceError(
                "the ranks' collectives are out of step since an earlier error, so this engine can't go on: restart from a "
                f"checkpoint, or shard a new model. The earlier error: {self.groups.broken}"
            )


class OnStream:
    """A collective on one of the engine's streams, with the methods of a backend's ``Work``, which ask the event after it."""

    def __init__(self, event: Any) -> None:
        self._event = event

    def is_completed(self) -> bool:
        return bool(self._event.query())

    def wait(self) -> None:
        """Return at once: the stream that reads the result waits for the event, see :class:`Pending`."""


class Pending:
    """A collective in flight. ``wait`` returns when its result may be read by the current stream."""

    __slots__ = ("channel", "event", "number", "ordered", "streams", "watchdog", "what", "work")

    def __init__(
        self,
        watchdog: Watchdog,
        channel: Channel,
        number: int,
        what: str,
        work: Any,
        event: Any = None,
        streams: Streams | None = None,
        ordered: bool = False,
    ) -> None:
        """Note what was issued on `channel`.

        Args:
            watchdog: watches the waits.
            channel: the channel, on which this is collective `number`.
            number: the result of :meth:`Channel.count`.
            what: the name of the operation, for error messages.
            work: the backend's ``Work``, or an :class:`OnStream`; None if there is nothing to wait for.
            event: on a device, recorded on the side stream after the collective.
            streams: the streams of the side stream's device.
            ordered: on a device, every rank is known to have come, so that the streams alone wait and the host goes on.
        """
        self.watchdog, self.channel, self.number, self.what, self.work = watchdog, channel, number, what, work
        self.event, self.streams, self.ordered = event, streams, ordered
        if work is not None and event is None:
            channel.groups.in_flight[channel.name] = work

    def done(self) -> bool:
        """Return True if the collective has ended."""
        return self.work is None or bool(self.work.is_completed())

    def wait_at_most(self, seconds: float) -> bool:
        """Wait for at most `seconds`; return False if the collective is still running."""
        if self.done():
            return True
        if seconds <= 0.0:
            return False
        if self.event is not None:  # training waits on the stream, and StreamWaits counts that
            return ends_within(self.work, seconds, self)
        return self._counted(ends_within, self.work, seconds, self)

    def wait(self) -> None:
        """Return when the current stream may read the result."""
        if self.event is None and not self.ordered:
            if self.work is not None:
                self._counted(self._wait)
            return
        timed = self.watchdog.stream_waits
        if timed is None:
            self._wait()
        else:
            reached = timed.begin()
            self._wait()
            timed.end(self.channel, reached)

    def _counted(self, function: Callable[..., _Value], *args: Any) -> _Value:
        """Call `function`, in which the host waits for the collective: count the time, and label it in profiles."""
        begun = time.perf_counter()
        try:
            if profiling():
                with waiting(self.what):
                    return function(*args)
            return function(*args)
        finally:
            self.channel.waited += time.perf_counter() - begun

    def _wait(self) -> None:
        work = self.work
        if work is not None:
            groups = self.channel.groups
            if self.event is not None:
                pass  # the current stream waits for it below, and the host does not
            elif self.ordered or (groups.broken and work.is_completed()):
                work.wait()  # NCCL's wait only orders the current stream
            elif self.watchdog.on_streams or groups.broken or not _ends(work, self.watchdog.first_tick):
                self.watchdog.wait(self)
            groups.buffers.pop(work, None)
            if groups.in_flight.get(self.channel.name) is work:
                del groups.in_flight[self.channel.name]  # it holds tensors
            self.work = None
        if self.event is not None:
            assert self.streams is not None
            # Hazard: the compute stream must not read the buffer before the side stream has filled it.
            self.streams.wait(self.event)
            self.event = None


def _ends(work: Any, within: timedelta) -> bool:
    """Return True if a Gloo collective succeeds within this time, as in most waits."""
    try:
        work.wait(within)
    except RuntimeError:
        return False
    return True


def raise_if_lost(watchdog: Watchdog, channel: Channel, what: str, error: RuntimeError) -> None:
    """Raise a MissingRankError if `error` is a backend's that can't reach another rank, and tell the others; else return."""
    reason = str(error).partition("\n")[0]  # NCCL's text goes on with what each of its threads was doing
    if isinstance(error, dist.DistBackendError):  # which may also mean that the device, or the call, is wrong
        is_lost = "remote process" in reason
    else:  # Gloo's errors have no class of their own; those of devices and memory do
        is_lost = type(error) is RuntimeError or isinstance(error, dist.DistError)
    if is_lost:
        failure = MissingRankError(
            f"rank {watchdog.rank}: {what} failed at {caller_line()}: another rank has probably died; see its log."
            f"{watchdog.troubles()} ({reason})"
        )
        channel.groups.abort(watchdog.rank, failure)
        raise failure from error


class Works:
    """Several works that are waited for as one."""

    def __init__(self, works: list[Any]) -> None:
        self._works = works

    def is_completed(self) -> bool:
        return all(work.is_completed() for work in self._works)

    def wait(self, timeout: timedelta | None = None) -> None:
        deadline = None if timeout is None else time.monotonic() + timeout.total_seconds()
        for work in self._works:
            if deadline is None or work.is_completed():
                work.wait()
            else:
                work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))


def ends_within(work: Any, seconds: float, pending: Pending) -> bool:
    """Return True when `work` is done, and False if it still runs after `seconds`.

    Raises:
        MissingRankError: the collective failed.
    """
    try:
        if pending.watchdog.on_streams and pending.channel.purpose not in ("control", "message", "host barrier"):
            # NCCL's own wait with a limit aborts the communicator when the limit is reached.
            deadline = time.monotonic() + seconds
            while not work.is_completed():
                if time.monotonic() > deadline:
                    return False
                time.sleep(POLL)
            work.wait()
            return True
        try:
            work.wait(timedelta(seconds=seconds))
        except RuntimeError:
            if not work.is_completed():
                return False
            work.wait()  # returns if the collective succeeded just after the time was up, else raises its error again
    except RuntimeError as error:
        raise_if_lost(pending.watchdog, pending.channel, pending.what, error)
        raise
    return True
