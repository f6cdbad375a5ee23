"""Waits for collectives with a timeout, and errors that say what each rank waits in.

Every blocking wait of the engine goes through :class:`Watchdog`. A rank whose partner does not come therefore raises an error
that says what each rank waits in, instead of hanging until the timeout of the process group.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist

from ..errors import DivergenceError, MissingRankError, ShardError
from ..log import ANY_RANK, logger
from ..utils.autograd_private import outside_saved_tensors_hooks
from .store_messages import Messages, longest_pause
from .work import (
    FIRST_STEP,
    FIRST_TICK,
    LEAVES,
    SLOW,
    TICK,
    Pending,
    caller_line,
    default_store,
    ends_within,
    raise_if_lost,
)

if TYPE_CHECKING:
    from .traffic_statistics import StreamWaits
    from .work import Channel


class _Post(NamedTuple):
    """A rank's post in the store for the others.

    Attributes:
        channel: the channel of the collective in which the rank waits; "" for trouble that it tells.
        number: the number of that collective.
        what: the name of the operation, or the trouble.
        line: the line of the user's code.
        issued: the number of collectives that the rank has issued, by channel.
    """

    channel: str
    number: int
    what: str
    line: str
    issued: dict[str, int]


class Watchdog:
    """The waits for collectives, which have a timeout, and the explanation of a wait that does not end.

    A rank that has waited for a second posts in the store which collective it waits in, and how many collectives of each
    channel it has issued. If each of two ranks waits in a collective that the other has not issued, neither can ever go on,
    and both raise at once. A partner that posts nothing is named in a warning after :data:`SLOW` seconds, and in an error
    after ``timeout`` seconds.

    All ranks may wait for one rank. While no rank posts anything new, a look at the store is one request. Reading new posts
    takes three more requests, however many ranks there are.

    It also holds two texts that errors quote and that a front end may replace: ``saving_advice``, which says how to save full
    values, and ``handle``, the expression by which the user reaches the engine.
    """

    def __init__(self, rank: int, ranks: list[int], timeout: float, key: str) -> None:
        self.rank, self.size, self.ranks, self._timeout, self.key = rank, len(ranks), ranks, timeout, key
        self.channels: dict[str, Channel] = {}  # by name
        self.handle = "engine"
        self.saving_advice = (
            'Save engine.state_dict(form="full") instead, and for optimizers engine.optim_state_dict(optimizer), called on all '
            "ranks, and let all ranks call torch.distributed.barrier() after one rank has written the file."
        )
        self.first_tick = timedelta(seconds=min(FIRST_TICK, timeout))
        self._tick = TICK + self.size / 1000
        self._posts: Messages | None = None  # what each rank waits in, or has told
        self._told = False
        self.on_streams = False  # NCCL: see ends_within and host_barrier
        self.stream_waits: StreamWaits | None = None  # NCCL: measures how long streams wait, if that was requested

    def add(self, channel: Channel) -> Channel:
        """Add and return a channel of the engine."""
        self.channels[channel.name] = channel
        return channel

    @property
    def timeout(self) -> float:
        """The seconds that this rank waits; on a device at least :data:`FIRST_STEP` until the first step has ended."""
        early = self.on_streams and "control" in self.channels and not self.channels["control"].groups.has_stepped
        return max(self._timeout, FIRST_STEP) if early else self._timeout

    def note_step(self) -> None:
        """Note that an optimizer has stepped, and withdraw what was told before. Not collective."""
        if self._told:
            self._told = False
            self._withdraw()
        if "control" in self.channels:
            self.channels["control"].groups.has_stepped = True

    @contextlib.contextmanager
    def timeout_at_least(self, seconds: float) -> Iterator[None]:
        """Raise the timeout to at least `seconds` inside this context, for calls by which the user waits. Not collective."""
        before = self._timeout
        self._timeout = max(before, seconds)
        try:
            yield
        finally:
            self._timeout = before

    def tell(self, trouble: str) -> None:
        """Post `trouble`, which ranks that wait for this one in vain quote in their errors. Not collective.

        They do so until its next optimizer step, or until it has waited for long itself. `trouble` is a sentence without
        the subject: "ran out of memory in the forward".
        """
        if self.size > 1:
            self._told = True
            self._write(_Post("", 0, trouble, caller_line(), {}))

    def troubles(self) -> str:
        """Return what other ranks have told, as sentences that each begin with a space. Not collective."""
        try:
            posts = self._posts_in(Messages(default_store(), self.key))
        except (RuntimeError, ValueError):  # the rank that serves the store is gone, or the process group
            return ""
        return "".join(f" Rank {rank} {post.what} at {post.line}." for rank, post in posts.items() if not post.channel)

    def _post(self, channel: Channel, number: int, what: str) -> None:
        self._write(_Post(channel.name, number, what, caller_line(), channel.groups.issued))

    def _write(self, post: _Post) -> None:
        with contextlib.suppress(RuntimeError):  # the rank that serves the store is gone: the wait itself fails
            if self._posts is None:
                self._posts = Messages(default_store(), self.key)
            self._posts.write(self.rank, json.dumps(post))

    def _withdraw(self) -> None:
        with contextlib.suppress(RuntimeError):
            if self._posts is not None:
                self._posts.write(self.rank, "")

    def _new_posts(self) -> dict[int, _Post] | None:
        """Return what the other ranks have posted, by rank; None if no rank has posted since the last call."""
        with contextlib.suppress(RuntimeError):
            if self._posts is not None and self._posts.changed():
                return self._posts_in(self._posts)
        return None

    def _posts_in(self, messages: Messages) -> dict[int, _Post]:
        """Return what the other ranks have posted and not withdrawn, by rank."""
        return {rank: _Post(*json.loads(text)) for rank, text in messages.read().items() if text and rank != self.rank}

    def wait(self, pending: Pending) -> None:
        """Wait for a collective that has not ended within the first tick, or that has failed.

        Raises:
            DivergenceError: the ranks run different operations, or another rank stopped at an error.
            MissingRankError: the collective failed, or has not ended after ``timeout`` seconds.
        """
        work, groups = pending.work, pending.channel.groups
        comparisons, service = groups.comparisons, groups.comparisons.service
        comparisons.finish(only_if_known=True)  # it may say why this collective does not end, or has failed
        pending.channel.check()
        if self.on_streams and ends_within(work, self.first_tick.total_seconds(), pending):
            return
        begin = time.monotonic() - FIRST_TICK
        deadline = begin + self.timeout
        warned = self.timeout <= SLOW
        # The watchdog's own post is new to it, too, so that it reads the posts at once.
        self._post(pending.channel, pending.number, pending.what)
        posts: dict[int, _Post] = {}
        outer = None if service is None else service.collective
        try:
            if service is not None:
                service.collective = pending.channel.name, pending.channel.members, pending.number
            while True:
                if ends_within(work, self._tick, pending):
                    return
                if comparisons.finish(only_if_known=True):  # it may have waited, with posts of its own
                    self._post(pending.channel, pending.number, pending.what)
                new_posts = self._new_posts()
                posts = posts if new_posts is None else new_posts
                stuck = self._deadlocked(pending, posts)
                if stuck:
                    # Leave the others time to read this post before it is withdrawn.
                    time.sleep(2 * self._tick)
                    raise DivergenceError(
                        f"rank {self.rank} waits in {pending.what} at {caller_line()}, while "
                        + "; ".join(f"rank {r} waits in {posts[r].what} at {posts[r].line}" for r in stuck)
                        + ". The ranks run different operations: every rank must run the same forwards, backwards, "
                        "norms, gathers and saves in the same order (look for code under `if rank == ...`)."
                    )
                if new_posts is not None and (past := groups.failure()) is not None:
                    kind = MissingRankError if past.kind == MissingRankError.__name__ else DivergenceError
                    raise kind(
                        f"rank {self.rank} waits in {pending.what} at {caller_line()}, and rank {past.rank} won't come: it "
                        f"stopped at an error. Restart from a checkpoint, or shard a new model. That error: {past.text}"
                    )
                if time.monotonic() > max(deadline, comparisons.served() + self.timeout):
                    raise MissingRankError(self._explain(pending, posts))
                if not warned and time.monotonic() > begin + SLOW:
                    warned = True
                    self._warn(pending, posts)
        except ShardError as error:
            groups.abort(self.rank, error)
            raise
        finally:
            if service is not None:
                service.collective = outer
            self._withdraw()

    def host_barrier(self, what: str) -> None:
        """Wait on the host, with NCCL, until every rank has come to a collective that user code blocks in. Collective.

        The streams alone can then wait for the collective itself. If the host waited for its end, it would wait for all
        work that the device has queued before it.
        """
        if self.on_streams:
            blocking(self, "host barrier", what, dist.all_reduce, torch.zeros(1, device="cpu"))

    def exchange(self, what: str, value: Any, own: str = "", listen: bool = True) -> list[Any]:
        """Return the `value` of every rank, by rank, to explain an error. Collective.

        The values travel through the store, with a timeout, because collectives can't be relied on once the ranks differ: a
        partner may have paired the previous operation with a wrong one, or may have given it up long ago.

        Args:
            what: the operation that found the difference.
            value: the value of this rank; it must be picklable.
            own: this rank's own history, for the error if a partner does not come.
            listen: False to leave this rank's value without waiting for the others, whose values are None then.

        Raises:
            DivergenceError: a partner gave up earlier, so it won't come.
            MissingRankError: a partner did not come in time.
        """
        channel = self.channels["control"]
        groups = channel.groups
        if not groups.key:  # no other rank exists
            return [value if rank == self.rank else None for rank in range(self.size)]
        groups.exchanges += 1
        messages = Messages(default_store(), f"{groups.key}/exchange/{groups.exchanges}")
        read = Messages(default_store(), f"{groups.key}/exchange/{groups.exchanges}/read")
        pause, deadline = 0.005, time.monotonic() + self.timeout
        self._post(channel, channel.issued + 1, f"the comparison of the ranks in {what}")
        try:
            messages.write(self.rank, pickle.dumps(value))
            missing = list(range(self.size)) if listen else []
            while missing:
                if messages.changed():
                    came = messages.writers()
                    missing = [rank for rank in missing if rank not in came]
                if missing:
                    self._check_answers(what, missing, own, deadline)
                    time.sleep(pause)
                    pause = min(2 * pause, longest_pause(self.size))
            found = messages.read() if listen else {}
            read.announce()
            self._outlast(read)
        except ShardError as error:
            groups.abort(self.rank, error)
            raise
        except RuntimeError as error:
            raise MissingRankError(
                f"rank {self.rank}: {what} at {caller_line()}: the ranks differ, and the store through which they report "
                f"the difference can't be reached. The rank that serves it has probably died; see its log. ({error})"
            ) from error
        finally:
            self._withdraw()
        return [pickle.loads(found[rank]) if rank in found else None for rank in range(self.size)]

    def _outlast(self, read: Messages) -> None:
        """Wait for a short time, on the rank that may serve the store, until all ranks have read.

        An error follows, with which this process may end. The others would then find no store instead of that error.
        """
        deadline = time.monotonic() + min(self.timeout, LEAVES)
        while dist.get_rank() == 0 and read.announced() < self.size and time.monotonic() < deadline:
            time.sleep(longest_pause(self.size))

    def _check_answers(self, what: str, missing: list[int], own: str, deadline: float) -> None:
        where = f"rank {self.rank}: {what} at {caller_line()}"
        past = self.channels["control"].groups.failure()
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

    def _deadlocked(self, pending: Pending, posts: dict[int, _Post]) -> list[int]:
        """Return the ranks that wait for this one in a collective while this one waits for them in another."""
        stuck = []
        for rank, post in posts.items():
            mine = self.channels.get(post.channel)
            they_lack_mine = (
                rank in pending.channel.members and post.issued.get(pending.channel.name, 0) < pending.number
            )
            i_lack_theirs = mine is not None and rank in mine.members and mine.issued < post.number
            if they_lack_mine and i_lack_theirs:
                stuck.append(rank)
        return stuck

    def _warn(self, pending: Pending, posts: dict[int, _Post]) -> None:
        """Log a warning once for all ranks that wait: only the lowest rank that has posted a wait logs it."""
        if not any(rank in posts and posts[rank].channel for rank in range(self.rank)):
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

    def _elsewhere(self, posts: dict[int, _Post]) -> str:
        """Return what the other ranks do, as far as it is known, in one clause for each."""
        silent = [rank for rank in range(self.size) if rank != self.rank and rank not in posts]
        # One service is asked, since each may let this rank wait.
        place = (self.place_of(silent[0]) if silent else "") or "or is gone"
        return "; ".join(
            f"rank {rank} {'waits in ' * bool(posts[rank].channel)}{posts[rank].what} at {posts[rank].line}"
            if rank in posts
            else f"rank {rank} is not waiting in an operation of the engine (it runs other code, perhaps shard(), "
            f"{place if rank == silent[0] else 'or is gone'})"
            for rank in range(self.size)
            if rank != self.rank
        )

    def place_of(self, rank: int) -> str:
        """Return "at" and the line where another rank is now, for messages; "" if its service does not answer. Not collective."""
        partners = next(iter(self.channels.values())).groups.comparisons.partners
        line = "" if partners is None else partners.line_of(rank)
        return f"at {line}" if line else ""

    def _explain(self, pending: Pending, posts: dict[int, _Post]) -> str:
        return (
            f"rank {self.rank} waited {self.timeout:g} s in {pending.what} at {caller_line()}; {self._elsewhere(posts)}. "
            "The operation is collective: call it on every rank (look for code under `if rank == ...`). Work that one rank "
            "does alone for longer, such as writing a checkpoint, must be followed by a torch.distributed.barrier() on every "
            "rank; or raise ShardConfig(timeout=...) (of ShardPlugin under Accelerate, of the strategy under Lightning)."
        )


def _named(ranks: list[int]) -> str:
    return f"rank {ranks[0]}" if len(ranks) == 1 else "ranks " + ", ".join(map(str, ranks))


def blocking(
    watchdog: Watchdog, name: str, what: str, function: Any, *args: Any, ordered: bool = False, **kwargs: Any
) -> None:
    """Run a collective of torch.distributed in the channel `name`, and wait for it with the watchdog's timeout. Collective.

    `ordered` has the meaning that :class:`Pending` gives it.
    """
    channel = watchdog.channels[name]
    number = channel.count()
    try:
        work = outside_saved_tensors_hooks(function, *args, group=channel.group, async_op=True, **kwargs)
        Pending(watchdog, channel, number, what, work, ordered=ordered).wait()
    except dist.DistBackendError as error:
        raise_if_lost(watchdog, channel, what, error)
        raise
