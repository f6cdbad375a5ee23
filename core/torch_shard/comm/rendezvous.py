"""Rendezvous through the default process group's store, whose timeouts name the missing ranks, as a collective's don't."""

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


def _meet(group: Any, ranks: list[int], single: bool, usable: bool, timeout: float, posts_key: str) -> str:
    """Wait for every rank, and decide with them whether new process groups are made. Collective.

    `new_group` alone would wait for the group's own timeout, half an hour by default. The decision has to be common because
    one rank may have to replace groups (it gave up a collective in them, or destroyed them) that still work on another.

    Ranks meet in numbered rounds. Each rank counts its own rounds, so that a retry never takes an earlier arrival for a new
    one. A round ends with one outcome: the rank that arrives last decides "keep", "renew" or "differ" (the ranks differ in
    `single`), and a rank whose timeout has passed decides "apart". A rank that arrives in a round which has ended without it
    goes on to the next round. A round leaves three small keys in the store, and the number of requests to the store does not
    grow with the number of rounds.

    Args:
        group: the user's process group.
        ranks: the global ranks of `group`.
        single: True if this rank wants a single communicator.
        usable: True if this rank could go on with the present groups.
        timeout: seconds to wait for the other ranks.
        posts_key: the key of the present groups, under which ranks post what they wait in (see Watch); "" if there are none.

    Returns:
        The key of the round if new groups are to be made, "" if the present groups stay.
    """
    try:
        return _outcome(group, ranks, single, usable, timeout, posts_key)
    except ShardError:
        raise
    except RuntimeError as error:
        raise MissingRankError(
            f"rank {dist.get_rank()}: shard() at {caller_line()} can't reach the store through which the ranks meet; the rank "
            f"that serves it has probably died, see its log. ({error})"
        ) from error


def _outcome(group: Any, ranks: list[int], single: bool, usable: bool, timeout: float, posts_key: str) -> str:
    store, rank = default_store(), dist.get_rank()
    # Disjoint groups may share a name.
    name = f"torch_shard/meet/{group.group_name}/{ranks[0]}"
    deadline = time.monotonic() + timeout
    posts = Messages(store, posts_key) if posts_key else None
    late = True
    while late:
        here = f"{name}/round {store.add(f'{name}/{rank}', 1)}"
        # Listed before it is counted, so that the last rank finds all others in the list.
        store.append(f"{here}/came", f"{rank},{single:d},{usable:d} ")
        late = False
        if store.add(f"{here}/here", 1) == len(ranks):
            arrived = _arrived(store, here).values()
            proposal = "keep" if all(is_usable for _, is_usable in arrived) else "renew"
            outcome = _decide(store, here, proposal if len({is_single for is_single, _ in arrived}) == 1 else "differ")
            late = outcome == "apart"
        else:
            late = store.check([f"{here}/outcome"]) and store.get(f"{here}/outcome") == b"apart"
            outcome = "" if late else _wait_for_outcome(store, here, deadline, ranks, posts)
    if outcome == "apart":
        missing = _missing(store, here, ranks)
        waits = "" if posts is None else _waits_in(posts, {ranks.index(r): r for r in missing})
        raise MissingRankError(
            f"rank {rank} waited {timeout:g} s in shard() at {caller_line()} for ranks {missing}{waits}. It is collective: call "
            "it on every rank, with the same settings, and see whether it failed there."
        )
    if outcome == "differ":
        arrivals = _arrived(store, here)
        having = [r for r in ranks if arrivals[r][0]]
        without = [r for r in ranks if r not in having]
        raise ConfigError(
            f"single_communicator: ranks {having} have True and ranks {without} have False; pass the same on all ranks."
        )
    return here if outcome == "renew" else ""


def _arrived(store: Any, here: str) -> dict[int, tuple[bool, bool]]:
    """Return the ranks that have arrived in a round, with `single` and `usable` of each. This rank must have arrived."""
    entries = [entry.split(",") for entry in store.get(f"{here}/came").decode().split()]
    return {int(rank): (single == "1", usable == "1") for rank, single, usable in entries}


def _missing(store: Any, here: str, ranks: list[int]) -> list[int]:
    arrived = _arrived(store, here)
    return [rank for rank in ranks if rank not in arrived]


def _decide(store: Any, here: str, proposal: str) -> str:
    """Set the outcome of a round to `proposal` if no rank has set it, and return the outcome."""
    return str(store.compare_set(f"{here}/outcome", "", proposal).decode())


def _wait_for_outcome(store: Any, here: str, deadline: float, ranks: list[int], posts: Messages | None) -> str:
    pause, begin, posted = 0.0005, time.monotonic(), False
    slow, number = begin + SLOW, ranks.index(dist.get_rank())
    try:
        while not store.check([f"{here}/outcome"]):
            now = time.monotonic()
            if now > deadline:
                return _decide(store, here, "apart")
            if slow < min(now, deadline):
                slow = deadline
                _warn(_missing(store, here, ranks), deadline - begin)
            if posts is not None and not posted and now > begin + FIRST_TICK:
                posted = True
                # With the number 0, a rank that waits in another operation names this post, but doesn't take it for a deadlock.
                posts.write(number, json.dumps(["control", 0, "shard()", caller_line(), {}]))
            time.sleep(pause)
            pause = min(2 * pause, longest_pause(len(ranks)))
    except BaseException:  # say an interrupt: no rank may go on as if this rank were here
        with contextlib.suppress(RuntimeError):
            _decide(store, here, "apart")
        raise
    finally:
        if posted and posts is not None:
            with contextlib.suppress(RuntimeError):
                posts.write(number, "")
    return str(store.get(f"{here}/outcome").decode())


def _waits_in(posts: Messages, missing: dict[int, int]) -> str:
    """Return a text with what missing ranks wait in; `missing` maps numbers in the group to global ranks."""
    waits = ""
    for number, text in posts.read().items():
        if number in missing and text:
            _, _, what, line, _ = json.loads(text)
            waits += f"; rank {missing[number]} waits in {what} at {line}"
    return waits


def exchange_texts(ranks: list[int], name: str, mine: str, timeout: float, what: str = "shard()") -> dict[int, str]:
    """Return the text `mine` of each of the global `ranks`, by rank. Collective over them.

    The texts travel through the store, because `new_group` and torch's object collectives would wait for the group's own
    timeout without naming the missing ranks.

    Args:
        ranks: global ranks, this one included.
        name: the prefix of the keys in the store, equal on all ranks and never used before.
        mine: the text of this rank.
        timeout: seconds to wait for the other ranks.
        what: the name of the operation, for error messages.

    Raises:
        MissingRankError: a rank has not come within `timeout` seconds.
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
        texts = messages.read()
        return {rank: texts[rank].decode().removeprefix("said ") for rank in ranks}
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
