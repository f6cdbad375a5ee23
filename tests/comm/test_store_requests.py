"""Many ranks that wait for one: what each asks the store must not grow with their number, since one process answers all."""

from __future__ import annotations

import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist

from torch_shard.comm import rendezvous
from torch_shard.comm.heartbeat_barrier import HeartbeatBarrier
from torch_shard.comm.process_groups import ProcessGroups
from torch_shard.comm.rendezvous import exchange_texts
from torch_shard.comm.watchdog import Watchdog
from torch_shard.comm.work import Channel, Pending
from torch_shard.errors import DivergenceError, MissingRankError

SIZE = 256
AT_MOST = 40  # requests of a rank in some seconds
WHILE = 150  # and while it asks, again and again, whether another one has come; fewer than there are ranks


class Rank(threading.local):
    """Which rank this thread stands for."""

    number = -1


class CountingStore:
    """A store that counts the requests of each rank; one for several keys is one."""

    def __init__(self, me: Rank) -> None:
        self.store, self.me = dist.HashStore(), me
        self.requests: Counter[int] = Counter()

    def __getattr__(self, name: str) -> Any:
        def call(*args: Any) -> Any:
            self.requests[self.me.number] += 1
            return getattr(self.store, name)(*args)

        return call


class NeverEnds:
    """The work of a collective in which one rank is missing."""

    def is_completed(self) -> bool:
        return False

    def wait(self, timeout: timedelta) -> None:
        time.sleep(timeout.total_seconds())
        raise RuntimeError("timed out")


def on_ranks(function: Any) -> tuple[list[Any], CountingStore]:
    """Call ``function(rank)`` at the same time for as many ranks, in threads; what each returned or raised."""
    me, begun = Rank(), threading.Barrier(SIZE)
    store = CountingStore(me)

    def run(rank: int) -> Any:
        me.number = rank
        begun.wait()
        try:
            return function(rank)
        except Exception as error:
            return error

    with ExitStack() as stack:
        for place in [
            f"torch_shard.comm.{file}.default_store" for file in ("watchdog", "rendezvous", "process_groups")
        ]:
            stack.enter_context(mock.patch(place, return_value=store))
        stack.enter_context(mock.patch.object(dist, "get_rank", side_effect=lambda *_: me.number))
        stack.enter_context(mock.patch.object(dist, "get_backend", return_value="gloo"))
        pool = stack.enter_context(ThreadPoolExecutor(SIZE))
        return list(pool.map(run, range(SIZE))), store


def waits(rank: int, name: str = "reduce", timeout: float = 6.0) -> None:
    """What a rank does whose partners don't all come to a collective in the channel `name`."""
    groups = ProcessGroups(list(range(SIZE)), "groups", made={"reduce": None, "all-gather": None})
    watch = Watchdog(rank, groups.ranks, timeout, groups.key)
    for purpose in groups.made:
        watch.channels[purpose] = Channel(purpose, groups, range(SIZE))
    channel = watch.channels[name]
    watch.wait(Pending(watch, channel, channel.count(), f"the {name} of a test", NeverEnds()))


def test_all_ranks_that_wait_for_one_ask_little_and_name_it() -> None:
    missing = SIZE // 2
    ends, store = on_ranks(lambda rank: None if rank == missing else waits(rank))
    for rank, error in enumerate(ends):
        if rank == missing:
            continue
        assert isinstance(error, MissingRankError), error
        text = str(error)
        # The first whose time is up says it of all, and the others may hear of that one.
        other = next(r for r in range(SIZE) if r not in (rank, missing))
        assert f"rank {missing} is not waiting in an operation of the engine" in text, text
        assert f"rank {other} waits in the reduce of a test at {__file__}" in text or "won't come" in text, text
    assert max(store.requests.values()) <= AT_MOST, max(store.requests.values())


class EndsLate:
    """The work of a collective that another rank has come to late."""

    def is_completed(self) -> bool:
        return True

    def wait(self, timeout: timedelta) -> None:
        pass


def test_a_step_after_a_wait_asks_nothing() -> None:
    """What the rank has posted is withdrawn at the end of the wait."""
    store, groups = CountingStore(Rank()), ProcessGroups([0, 1], "groups", made={"reduce": None})
    with mock.patch("torch_shard.comm.watchdog.default_store", return_value=store):
        watch = Watchdog(0, groups.ranks, 6.0, groups.key)
        channel = watch.add(Channel("reduce", groups, range(2)))
        watch.wait(Pending(watch, channel, channel.count(), "the reduce of a test", EndsLate()))
        asked = store.requests.total()
        watch.note_step()
    assert store.requests.total() == asked > 0


@pytest.mark.exhaustive
def test_ranks_that_wait_for_each_other_find_it_out_with_few_requests() -> None:
    names = ("reduce", "all-gather")
    begin = time.monotonic()
    ends, store = on_ranks(lambda rank: waits(rank, names[rank % 2], timeout=60.0))
    assert all(isinstance(error, DivergenceError) for error in ends), ends
    assert any("rank 1 waits in the all-gather of a test" in str(error) for error in ends)
    assert time.monotonic() - begin < 30
    assert max(store.requests.values()) <= AT_MOST, max(store.requests.values())


def test_ranks_that_tell_each_other_how_they_differ_ask_little() -> None:
    def tell(rank: int) -> tuple[list[Any], str]:
        groups = ProcessGroups(list(range(SIZE)), "groups", made={"control": None})
        watch = Watchdog(rank, groups.ranks, 60.0, groups.key)
        watch.add(Channel("control", groups, range(SIZE)))
        return watch.exchange("a test", f"what rank {rank} does"), watch.troubles()

    ends, store = on_ranks(tell)
    assert ends == [([f"what rank {rank} does" for rank in range(SIZE)], "")] * SIZE
    assert max(store.requests.values()) <= AT_MOST + WHILE, max(store.requests.values())


def test_ranks_that_wait_at_a_barrier_for_others_at_work_ask_little() -> None:
    def meet(rank: int) -> None:
        barrier = HeartbeatBarrier(rendezvous.default_store(), "a save", rank, SIZE, timeout=3.0)
        if rank % 2:
            with barrier.heartbeat():
                time.sleep(3.5)
        barrier.post("done")
        barrier.wait("done", list(range(SIZE)))

    ends, store = on_ranks(meet)
    assert ends == [None] * SIZE  # though nobody would wait for that long for a rank without a heartbeat
    assert max(store.requests[rank] for rank in range(SIZE)) <= AT_MOST + WHILE, store.requests.most_common(3)


@pytest.mark.exhaustive
def test_a_rank_that_says_nothing_is_named_on_all_others() -> None:
    missing = SIZE - 1

    def say(rank: int) -> tuple[str, dict[int, str]] | None:
        return None if rank == missing else exchange_texts(list(range(SIZE)), "a question", "here", 5.0)

    ends, store = on_ranks(say)
    for error in ends[:missing]:
        assert isinstance(error, MissingRankError) and f"for ranks [{missing}]" in str(error), error
    assert max(store.requests.values()) <= AT_MOST + WHILE, max(store.requests.values())
