"""How ranks meet through the default process group's store, where a collective would wait without saying for whom."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any

import torch.distributed as dist

from ..errors import ConfigError, MissingRankError, ShardError
from ..log import ANY_RANK, logger
from .store_messages import Messages, longest_pause
from .work import FIRST_TICK, SLOW, caller_line, default_store


def _meet(group: Any, ranks: list[int], single: bool, usable: bool, timeout: float, board: str) -> str:
    """Wait for every rank, and decide with them whether new process groups are made. Collective.

    `new_group` alone would wait for the group's own timeout, half an hour by default; and one rank may have to replace
    groups (it gave up a collective, or destroyed them) that are as good as new on another.

    Ranks meet in numbered rounds. Each counts its own, so a retry never takes an earlier arrival for a new one, and a
    round ends in one verdict: the rank that comes last keeps the groups or renews them, a rank whose time is up ends
    it for all. Who comes to a round that has ended without it goes on to the next. Three small keys remain of each, and what
    a rank asks the store does not grow with their number. `board` is the key of the present groups, under which the ranks say
    what they wait in (see Watch).

    Returns:
        The key of the round if new groups are to be made, "" if the present ones stay.
    """
    try:
        return _verdict(group, ranks, single, usable, timeout, board)
    except ShardError:
        raise
    except RuntimeError as error:
        raise MissingRankError(
            f"rank {dist.get_rank()}: shard() at {caller_line()} can't reach the store through which the ranks meet; the rank "
            f"that serves it has probably died, see its log. ({error})"
        ) from error


def _verdict(group: Any, ranks: list[int], single: bool, usable: bool, timeout: float, board: str) -> str:
    store, rank = default_store(), dist.get_rank()
    # Disjoint groups may share a name.
    name = f"torch_shard/meet/{group.group_name}/{ranks[0]}"
    deadline = time.monotonic() + timeout
    posts = Messages(store, board) if board else None
    late = True
    while late:
        here = f"{name}/round {store.add(f'{name}/{rank}', 1)}"
        # Before it is counted: the last one finds all.
        store.append(f"{here}/came", f"{rank},{single:d},{usable:d} ")
        late = False
        if store.add(f"{here}/here", 1) == len(ranks):
            answers = _came(store, here).values()
            said = "keep" if all(is_usable for _, is_usable in answers) else "renew"
            verdict = _decide(store, here, said if len({is_single for is_single, _ in answers}) == 1 else "differ")
            late = verdict == "apart"
        else:
            late = store.check([f"{here}/verdict"]) and store.get(f"{here}/verdict") == b"apart"
            verdict = "" if late else _wait_for_verdict(store, here, deadline, ranks, posts)
    if verdict == "apart":
        missing = _missing(store, here, ranks)
        said = "" if posts is None else _waits_in(posts, {ranks.index(r): r for r in missing})
        raise MissingRankError(
            f"rank {rank} waited {timeout:g} s in shard() at {caller_line()} for ranks {missing}{said}. It is collective: call "
            "it on every rank, with the same settings, and see whether it failed there."
        )
    if verdict == "differ":
        who = _came(store, here)
        having = [r for r in ranks if who[r][0]]
        without = [r for r in ranks if r not in having]
        raise ConfigError(
            f"single_communicator: ranks {having} have True and ranks {without} have False; pass the same on all ranks."
        )
    return here if verdict == "renew" else ""


def _came(store: Any, here: str) -> dict[int, tuple[bool, bool]]:
    """Who has come to a round: whether it wants a single communicator, and whether its groups are usable. This rank has come."""
    entries = [entry.split(",") for entry in store.get(f"{here}/came").decode().split()]
    return {int(rank): (single == "1", usable == "1") for rank, single, usable in entries}


def _missing(store: Any, here: str, ranks: list[int]) -> list[int]:
    came = _came(store, here)
    return [rank for rank in ranks if rank not in came]


def _decide(store: Any, here: str, verdict: str) -> str:
    """The verdict of a round: the first one counts."""
    return str(store.compare_set(f"{here}/verdict", "", verdict).decode())


def _wait_for_verdict(store: Any, here: str, deadline: float, ranks: list[int], posts: Messages | None) -> str:
    pause, begin, posted = 0.0005, time.monotonic(), False
    slow, number = begin + SLOW, ranks.index(dist.get_rank())
    try:
        while not store.check([f"{here}/verdict"]):
            now = time.monotonic()
            if now > deadline:
                return _decide(store, here, "apart")
            if slow < min(now, deadline):
                slow = deadline
                _warn(_missing(store, here, ranks), deadline - begin)
            if posts is not None and not posted and now > begin + FIRST_TICK:
                posted = True
                # The number 0: a rank that waits for another operation reports it, and takes it for no deadlock.
                posts.write(number, json.dumps(["control", 0, "shard()", caller_line(), {}]))
            time.sleep(pause)
            pause = min(2 * pause, longest_pause(len(ranks)))
    except BaseException:  # an interrupt: nobody may go on as if this rank were here
        with contextlib.suppress(RuntimeError):
            _decide(store, here, "apart")
        raise
    finally:
        if posted and posts is not None:
            with contextlib.suppress(RuntimeError):
                posts.write(number, "")
    return str(store.get(f"{here}/verdict").decode())


def _waits_in(posts: Messages, missing: dict[int, int]) -> str:
    """What missing ranks say that they wait in; `missing`: by their numbers in the group."""
    said = ""
    for number, text in posts.read().items():
        if number in missing and text:
            _, _, what, line, _ = json.loads(text)
            said += f"; rank {missing[number]} waits in {what} at {line}"
    return said


def told_by(ranks: list[int], name: str, mine: str, timeout: float, what: str = "shard()") -> dict[int, str]:
    """What each of these global ranks says under `name`, through the store: `new_group` and torch's object collectives would
    wait for the group's own timeout, and not say for whom. Collective over them. `what`: the operation, for messages.

    Raises:
        MissingRankError: one has not come within `timeout` seconds.
    """
    messages, me, begin = Messages(default_store(), name), dist.get_rank(), time.monotonic()
    deadline, slow = begin + timeout, begin + SLOW
    try:
        messages.write(me, f"said {mine}")
        pause, missing = 0.0005, ranks
        while True:
            if messages.changed():
                came = messages.writers()
                missing = [rank for rank in ranks if rank not in came]
            if not missing:
                break
            now = time.monotonic()
            if now > deadline:
                raise MissingRankError(
                    f"rank {me} waited {timeout:g} s in {what} at {caller_line()} for ranks {missing}. It is collective: call it "
                    "on every rank, with the same settings, and see whether it failed there."
                )
            if slow < now:
                slow = deadline
                _warn(missing, timeout, what)
            time.sleep(pause)
            pause = min(2 * pause, longest_pause(len(ranks)))
        said = messages.read()
        return {rank: said[rank].decode().removeprefix("said ") for rank in ranks}
    except ShardError:
        raise
    except RuntimeError as error:
        raise MissingRankError(
            f"rank {me}: {what} at {caller_line()} can't reach the store through which the ranks meet; the rank that serves it "
            f"has probably died, see its log. ({error})"
        ) from error


def _warn(missing: list[int], timeout: float, what: str = "shard()") -> None:
    logger.warning(
        "rank %d has waited %g s in %s at %s for ranks %s, and goes on waiting for up to %g s.",
        dist.get_rank(),
        SLOW,
        what,
        caller_line(),
        missing,
        timeout,
        extra=ANY_RANK,
    )
