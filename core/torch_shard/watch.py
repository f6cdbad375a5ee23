"""Waiting for a collective: with a limit, and with an error that says what each rank is waiting in.

Every blocking wait of the engine goes through :class:`Watch`, so that a rank whose partner does not come gets an
error that says what each rank is waiting in, instead of hanging until the process group's own timeout.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from .errors import DivergenceError, MissingRankError, ShardError
from .log import ANY_RANK, logger

if TYPE_CHECKING:
    from .groups import Groups
    from .statistics import StreamWaits

# Seconds of silence before a rank says, through the store, what it is waiting in.
FIRST_TICK = 1.0
# Seconds after which a rank that may wait for longer logs what it waits for.
SLOW = 30.0
POLL = 0.0002  # seconds between looks at a collective of NCCL's


def default_store() -> Any:
    """The store that the default process group was made with: works where collectives would wait."""
    return dist.distributed_c10d._get_default_store()  # no public accessor exists (torch 2.13)


# Packages that call the user's code and are called by it: their frames are not where the user's code waits.
_FRAMEWORKS = frozenset(
    (
        "accelerate",
        "accelerate_shard",
        "lightning",
        "lightning_fabric",
        "lightning_shard",
        "pytorch_lightning",
        "transformers",
    )
)


def caller_line() -> str:
    """`file:line` where the user's code waits: the innermost frame outside this package, torch, the training frameworks and
    Python's library. Where there is none, a frame of a framework is better than none."""
    frame: Any = sys._getframe(1)
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
    """One process group used for one purpose, by any engine."""

    def __init__(
        self, purpose: str, groups: Groups, group: Any, members: Sequence[int], number: int | None = None
    ) -> None:
        """`members`: the engine's ranks that `group` has. `number`: tells groups of one purpose apart. Channels of one name on
        different ranks have the same members, or none in common."""
        self.purpose, self.groups = purpose, groups
        self.name = purpose if number is None else f"{purpose} {number}"
        self.group, self.members = group, frozenset(members)
        self.waited = 0.0  # seconds, for its collectives
        groups.issued.setdefault(self.name, 0)

    @property
    def issued(self) -> int:
        """Its collectives on this rank, of all engines."""
        return self.groups.issued[self.name]

    def count(self) -> int:
        """Count one more collective, which is issued next; returns its number.

        Raises once a collective of the groups was left without its partner: the next one could pair with it, and give
        wrong numbers.
        """
        if self.groups.broken:
            self.check()
        number = self.groups.issued[self.name] = self.groups.issued[self.name] + 1
        return number

    def check(self) -> None:
        if self.groups.broken:
            raise DivergenceError(
                "the ranks' collectives are out of step since an earlier error, so this engine can't go on: restart from a "
                f"checkpoint, or shard a new model. The earlier error: {self.groups.broken}"
            )


@dataclass(eq=False, slots=True)
class Pending:
    """A collective in flight. ``wait`` returns when its result may be read by the current stream."""

    watch: Watch
    channel: Channel
    number: int
    what: str
    work: Any
    event: Any = None  # NCCL: recorded behind the collective on its side stream
    device: Any = None  # of that stream
    ordered: bool = False  # NCCL, and every rank is known to have come: left to the streams, the host goes on

    def __post_init__(self) -> None:
        if self.work is not None and self.event is None:
            self.channel.groups.unfinished[self.channel.name] = self.work

    def done(self) -> bool:
        return self.work is None or bool(self.work.is_completed())

    def settle(self, seconds: float) -> bool:
        """Wait at most this long; False if it is still going on."""
        if self.done():
            return True
        begun = time.perf_counter()
        try:
            return _bounded_wait(self.work, seconds, self, self.watch.rank)
        finally:
            if self.event is None:  # else the host has time: it is the stream that must not wait
                self.channel.waited += time.perf_counter() - begun

    def wait(self) -> None:
        if self.event is None and not self.ordered:
            if self.work is not None:
                begun = time.perf_counter()
                self._wait()
                self.channel.waited += time.perf_counter() - begun
            return
        streams = self.watch.stream_waits
        if streams is None:
            self._wait()
        else:
            reached = streams.begin()
            self._wait()
            streams.end(self.channel, reached)

    def _wait(self) -> None:
        work = self.work
        if work is not None:
            groups = self.channel.groups
            if self.ordered or self.event is not None or (groups.broken and work.is_completed()):
                work.wait()  # NCCL's only orders the current stream
            elif self.watch.polls or groups.broken or not _ends(work, self.watch.first_tick):
                self.watch.wait(self)
            groups.written.pop(work, None)
            if groups.unfinished.get(self.channel.name) is work:
                del groups.unfinished[self.channel.name]  # it holds tensors
            self.work = None
        if self.event is not None:
            # Hazard: the compute stream must not read the buffer before the side stream has filled it.
            torch.cuda.current_stream(self.device).wait_event(self.event)
            self.event = None


class Watch:
    """Waits with a limit, and explains a wait that is not coming to an end.

    A rank that has waited for a second posts in the group's store what it waits for and how many collectives of each
    channel it has issued. Two ranks that each wait for something the other has not issued can never go on: that is
    reported at once. A partner that posts nothing is named in a warning at :data:`SLOW` seconds, and reported at ``timeout``.
    """

    def __init__(self, rank: int, size: int, ranks: list[int], timeout: float, key: str) -> None:
        self.rank, self.size, self.ranks, self.timeout, self.key = rank, size, ranks, timeout, key
        self.channels: dict[str, Channel] = {}  # by name
        self.first_tick = timedelta(seconds=min(FIRST_TICK, timeout))
        self.polls = False  # NCCL: see _bounded_wait and meet
        self.stream_waits: StreamWaits | None = None  # NCCL: times what streams wait, where that was asked for

    @contextlib.contextmanager
    def patient(self, seconds: float) -> Iterator[None]:
        """Inside, this rank waits for at least so long: in what the user calls to wait. Not collective."""
        before = self.timeout
        self.timeout = max(before, seconds)
        try:
            yield
        finally:
            self.timeout = before

    def _post(self, channel: Channel, number: int, what: str) -> None:
        said = json.dumps([channel.name, number, what, caller_line(), channel.groups.issued])
        with contextlib.suppress(RuntimeError):  # the store is gone with its rank: the wait itself will say so
            default_store().set(f"{self.key}/{self.rank}", said)

    def _withdraw(self) -> None:
        with contextlib.suppress(RuntimeError):
            default_store().set(f"{self.key}/{self.rank}", "")

    def _read(self) -> dict[int, Any]:
        posts = {}
        with contextlib.suppress(RuntimeError):
            store = default_store()
            for rank in range(self.size):
                key = f"{self.key}/{rank}"
                if rank != self.rank and store.check([key]):
                    text = store.get(key).decode()
                    if text:
                        posts[rank] = json.loads(text)
        return posts

    def wait(self, pending: Pending) -> None:
        """For a collective that has not ended in the first tick, or that failed."""
        work = pending.work
        pending.channel.check()
        if self.polls and _bounded_wait(work, self.first_tick.total_seconds(), pending, self.rank):
            return
        groups = pending.channel.groups
        begin = time.monotonic() - FIRST_TICK
        deadline = begin + self.timeout
        warned = self.timeout <= SLOW
        self._post(pending.channel, pending.number, pending.what)
        try:
            while True:
                if _bounded_wait(work, 0.5, pending, self.rank):
                    return
                posts = self._read()
                stuck = self._deadlocked(pending, posts)
                if stuck:
                    # Leave the others time to read this post before it is withdrawn.
                    time.sleep(1.0)
                    raise DivergenceError(
                        f"rank {self.rank} waits in {pending.what} at {caller_line()}, while "
                        + "; ".join(f"rank {r} waits in {posts[r][2]} at {posts[r][3]}" for r in stuck)
                        + ". The ranks run different operations: every rank must run the same forwards, backwards, "
                        "norms, gathers and saves in the same order (look for code under `if rank == ...`)."
                    )
                if (past := groups.given_up()) is not None:
                    kind = MissingRankError if past.kind == MissingRankError.__name__ else DivergenceError
                    raise kind(
                        f"rank {self.rank} waits in {pending.what} at {caller_line()}, and rank {past.rank} won't come: it "
                        f"stopped at an error. Restart from a checkpoint, or shard a new model. That error: {past.text}"
                    )
                if time.monotonic() > deadline:
                    raise MissingRankError(self._explain(pending, posts))
                if not warned and time.monotonic() > begin + SLOW:
                    warned = True
                    self._warn(pending, posts)
        except ShardError as error:
            groups.give_up(self.rank, error)
            raise
        finally:
            self._withdraw()

    def meet(self, what: str) -> None:
        """NCCL: wait on the host until every rank has come to a collective that user code blocks in. Collective.

        The collective itself can then be left to the streams. Waiting for its end would mean waiting for everything that
        the device has to do before it.
        """
        if self.polls:
            blocking(self, "meet", what, dist.all_reduce, torch.zeros(1, device="cpu"))

    def exchange(self, what: str, value: Any, own: str = "", listen: bool = True) -> list[Any]:
        """What every rank has to say, by rank, where an error must be explained. Collective.

        Through the store and with a limit: the ranks differ already, and a partner may have paired with the operation
        before by mistake, or have given it up long ago.

        Args:
            what: the operation that found the difference.
            value: what this rank says; picklable.
            own: this rank's own history, for the error if a partner does not come.
            listen: False: say it only, and don't wait for the others (their values are None then).

        Raises:
            DivergenceError: a partner gave up earlier, so it won't come.
            MissingRankError: a partner did not come in time.
        """
        channel = self.channels["control"]
        groups = channel.groups
        said: list[Any] = [value if rank == self.rank else None for rank in range(self.size)]
        if not groups.key:  # no other rank exists
            return said
        groups.exchanges += 1
        name = f"{groups.key}/said/{groups.exchanges}"
        missing = [rank for rank in range(self.size) if rank != self.rank]
        deadline = time.monotonic() + self.timeout
        self._post(channel, channel.issued + 1, f"the comparison of the ranks in {what}")
        try:
            store = default_store()
            store.set(f"{name}/{self.rank}", pickle.dumps(value))
            while listen and missing:
                for rank in [r for r in missing if store.check([f"{name}/{r}"])]:
                    said[rank] = pickle.loads(store.get(f"{name}/{rank}"))
                    missing.remove(rank)
                if missing:
                    self._check_answers(what, missing, own, deadline)
                    time.sleep(0.005)
        except ShardError as error:
            groups.give_up(self.rank, error)
            raise
        except RuntimeError as error:
            raise MissingRankError(
                f"rank {self.rank}: {what} at {caller_line()}: the ranks differ, and the store through which they tell how "
                f"can't be reached; the rank that serves it has probably died, see its log. ({error})"
            ) from error
        finally:
            self._withdraw()
        return said

    def _check_answers(self, what: str, missing: list[int], own: str, deadline: float) -> None:
        where = f"rank {self.rank}: {what} at {caller_line()}"
        past = self.channels["control"].groups.given_up()
        if past is not None:
            raise DivergenceError(
                f"{where} met an operation that rank {past.rank} had given up, so the ranks are out of step.{own} Restart "
                f"from a checkpoint, or shard a new model. Rank {past.rank}'s error: {past.text}"
            )
        if time.monotonic() > deadline:
            raise MissingRankError(
                f"{where}: the ranks run different operations, and {_named(missing)} did not come within {self.timeout:g} s "
                f"to say which.{own} Every rank must run the same operations in the same order (look for code under "
                "`if rank == ...`)."
            )

    def _deadlocked(self, pending: Pending, posts: dict[int, Any]) -> list[int]:
        stuck = []
        for rank, (name, number, _what, _line, issued) in posts.items():
            mine = self.channels.get(name)
            they_lack_mine = rank in pending.channel.members and issued.get(pending.channel.name, 0) < pending.number
            i_lack_theirs = mine is not None and rank in mine.members and mine.issued < number
            if they_lack_mine and i_lack_theirs:
                stuck.append(rank)
        return stuck

    def _warn(self, pending: Pending, posts: dict[int, Any]) -> None:
        """Once for all ranks that wait: by the first of them, which may be any."""
        if not any(rank in posts for rank in range(self.rank)):
            logger.warning(
                "rank %d has waited %g s in %s at %s, and goes on waiting for up to %g s; %s.",
                self.rank,
                SLOW,
                pending.what,
                caller_line(),
                self.timeout,
                self._elsewhere(posts),
                extra=ANY_RANK,
            )

    def _elsewhere(self, posts: dict[int, Any]) -> str:
        others = []
        for rank in range(self.size):
            if rank == self.rank:
                continue
            if rank in posts:
                others.append(f"rank {rank} waits in {posts[rank][2]} at {posts[rank][3]}")
            else:
                others.append(f"rank {rank} waits in no operation of the engine (it runs other code, or is gone)")
        return "; ".join(others)

    def _explain(self, pending: Pending, posts: dict[int, Any]) -> str:
        return (
            f"rank {self.rank} waited {self.timeout:g} s in {pending.what} at {caller_line()}; {self._elsewhere(posts)}. "
            "The operation is collective: call it on every rank (look for code under `if rank == ...`). Work that one rank "
            "does alone for longer, such as writing a checkpoint, needs a torch.distributed.barrier() behind it, on every "
            "rank; or raise ShardConfig(timeout=...) (of ShardPlugin under Accelerate, of the strategy under Lightning)."
        )


def _named(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))


def blocking(
    watch: Watch, name: str, what: str, function: Any, *args: Any, ordered: bool = False, **kwargs: Any
) -> None:
    """Run a collective of torch.distributed's in the channel `name`, and wait for it with a limit. Collective. `ordered`:
    see :class:`Pending`."""
    channel = watch.channels[name]
    number = channel.count()
    work = function(*args, group=channel.group, async_op=True, **kwargs)
    Pending(watch, channel, number, what, work, ordered=ordered).wait()


def _ends(work: Any, within: timedelta) -> bool:
    """Whether a collective of Gloo's ends well in this time: all that most waits need."""
    try:
        work.wait(within)
    except RuntimeError:
        return False
    return True


def _bounded_wait(work: Any, seconds: float, pending: Pending, rank: int) -> bool:
    """True when the work is done, False when `seconds` passed without; a failed work raises."""
    if pending.watch.polls and pending.channel.name not in ("control", "meet"):
        # NCCL's own wait with a limit aborts the communicator when the limit is reached.
        deadline = time.monotonic() + seconds
        while not work.is_completed():
            if time.monotonic() > deadline:
                return False
            time.sleep(POLL)
        work.wait()
        return True
    try:
        try:
            work.wait(timedelta(seconds=seconds))
        except RuntimeError:
            if not work.is_completed():
                return False
            work.wait()  # it may have ended well just after the time was up; else this raises again
    except RuntimeError as error:
        raise MissingRankError(
            f"rank {rank}: {pending.what} failed at {caller_line()}: another rank has probably died; see its log. ({error})"
        ) from error
    return True
