"""Waiting for a collective: with a limit, and with an error that says what each rank is waiting in.

Every blocking wait of the engine goes through :class:`Watch`, so that a rank whose partner does not come gets an
error that says what each rank is waiting in, instead of hanging until the process group's own timeout.
"""

from __future__ import annotations

import contextlib
import json
import pickle
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from ..errors import DivergenceError, MissingRankError, ShardError
from ..log import ANY_RANK, logger
from .store_messages import Messages, longest_pause
from .work import FIRST_TICK, SLOW, TICK, Pending, _bounded_wait, caller_line, default_store

if TYPE_CHECKING:
    from .traffic_statistics import StreamWaits
    from .work import Channel


class Watch:
    """Waits with a limit, and explains a wait that is not coming to an end.

    A rank that has waited for a second posts in the group's store what it waits for and how many collectives of each
    channel it has issued. Two ranks that each wait for something the other has not issued can never go on: that is
    reported at once. A partner that posts nothing is named in a warning at :data:`SLOW` seconds, and reported at ``timeout``.

    All ranks may wait for one. As long as nothing new is posted a look at the store is one request, and then three more for the
    posts of all ranks, however many there are.
    """

    def __init__(self, rank: int, size: int, ranks: list[int], timeout: float, key: str) -> None:
        self.rank, self.size, self.ranks, self.timeout, self.key = rank, size, ranks, timeout, key
        self.channels: dict[str, Channel] = {}  # by name
        self.first_tick = timedelta(seconds=min(FIRST_TICK, timeout))
        self._tick = TICK + size / 1000
        self._board: Messages | None = None  # what the ranks wait in
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
            if self._board is None:
                self._board = Messages(default_store(), self.key)
            self._board.write(self.rank, said)

    def _withdraw(self) -> None:
        with contextlib.suppress(RuntimeError):
            if self._board is not None:
                self._board.write(self.rank, "")

    def _news(self) -> dict[int, Any] | None:
        """What the other ranks wait in, by rank, or None where nothing is new since the last look."""
        with contextlib.suppress(RuntimeError):
            if self._board is not None and self._board.changed():
                said = self._board.read()
                return {rank: json.loads(text) for rank, text in said.items() if text and rank != self.rank}
        return None

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
        self._post(pending.channel, pending.number, pending.what)  # which is news, so that there is a first look
        posts: dict[int, Any] = {}
        try:
            while True:
                if _bounded_wait(work, self._tick, pending, self.rank):
                    return
                news = self._news()
                posts = posts if news is None else news
                stuck = self._deadlocked(pending, posts)
                if stuck:
                    # Leave the others time to read this post before it is withdrawn.
                    time.sleep(2 * self._tick)
                    raise DivergenceError(
                        f"rank {self.rank} waits in {pending.what} at {caller_line()}, while "
                        + "; ".join(f"rank {r} waits in {posts[r][2]} at {posts[r][3]}" for r in stuck)
                        + ". The ranks run different operations: every rank must run the same forwards, backwards, "
                        "norms, gathers and saves in the same order (look for code under `if rank == ...`)."
                    )
                if news is not None and (past := groups.given_up()) is not None:
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
        missing, pause = [rank for rank in range(self.size) if rank != self.rank], 0.005
        deadline = time.monotonic() + self.timeout
        self._post(channel, channel.issued + 1, f"the comparison of the ranks in {what}")
        try:
            messages = Messages(default_store(), name)
            messages.write(self.rank, pickle.dumps(value))
            while listen and missing:
                if messages.changed():
                    came = messages.writers()
                    missing = [rank for rank in missing if rank not in came]
                if missing:
                    self._check_answers(what, missing, own, deadline)
                    time.sleep(pause)
                    pause = min(2 * pause, longest_pause(self.size))
            for rank, answer in messages.read().items() if listen else ():
                said[rank] = pickle.loads(answer)
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
