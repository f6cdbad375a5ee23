"""Rendezvous through the default process group's store. Unlike a collective's timeout, its error names the missing ranks."""

from __future__ import annotations

import contextlib
import json
import time
from typing import Any

import torch.distributed as dist

from ..errors import MissingRankError, ShardError
from ..log import ANY_RANK, logger
from .store_messages import longest_pause
from .work import SLOW, caller_line, default_store


def exchange_texts(
    ranks: list[int], name: str, mine: str, timeout: float, what: str = "shard()", wait: bool = True
) -> tuple[str, dict[int, str]]:
    """Exchange the text `mine` of each of the global `ranks` through the store. Collective over them.

    `new_group` and torch's object collectives would wait for the group's own timeout, half an hour by default, and not name the
    missing ranks.

    Ranks exchange texts in numbered rounds. Each rank counts its own rounds, so that a retry never takes an earlier text for a
    new one. A round ends with one outcome for all ranks: the rank that arrives last decides "together", and a rank whose timeout
    has passed decides "apart". A rank that arrives in a round which has ended without it goes on to the next round. A round
    leaves two small keys in the store, and the number of requests to the store does not grow with the number of ranks.

    Args:
        ranks: global ranks, this one included.
        name: the prefix of the keys in the store: equal on all ranks, and different for disjoint sets of ranks.
        mine: the text of this rank, which should be short.
        timeout: seconds to wait for the other ranks.
        what: the name of the operation, for error messages.
        wait: False to leave this rank's text without waiting for the others.

    Returns:
        A key that is equal on all ranks and that no other exchange returns, and the texts by rank, or none without `wait`.

    Raises:
        MissingRankError: a rank has not come within `timeout` seconds, or the store can't be reached.
    """
    if dist.get_backend() == "fake":  # torch's backend for a rank whose others don't exist: they do as this one
        return name, dict.fromkeys(ranks, mine)
    store, me = default_store(), dist.get_rank()
    try:
        while True:
            key = f"{name}/{store.add(f'{name}/{me}', 1)}"
            store.append(f"{key}/texts", json.dumps([me, mine]) + "\n")
            if len(_texts(store, key)) == len(ranks):
                outcome = _decide(store, key, "together")
            else:
                outcome = store.get(f"{key}/outcome").decode() if store.check([f"{key}/outcome"]) else ""
            if outcome != "apart":
                break  # else the round has ended without this rank
        if not wait:
            return key, {}
        if not outcome:
            _wait_for_outcome(store, key, ranks, timeout, what)
        return key, _texts(store, key)
    except ShardError:
        raise
    except RuntimeError as error:
        raise MissingRankError(
            f"rank {me}: {what} at {caller_line()} can't reach the store through which the ranks meet. The rank that serves it "
            f"has probably died; see its log. ({error})"
        ) from error


def _texts(store: Any, key: str) -> dict[int, str]:
    """Return the texts of the ranks that have arrived in a round. This rank must have arrived."""
    return dict(json.loads(line) for line in store.get(f"{key}/texts").splitlines())


def _decide(store: Any, key: str, outcome: str) -> str:
    """Set the outcome of a round if no rank has set it, and return the outcome."""
    return str(store.compare_set(f"{key}/outcome", "", outcome).decode())


def _wait_for_outcome(store: Any, key: str, ranks: list[int], timeout: float, what: str) -> None:
    """Wait until all ranks have come; raise a MissingRankError if this rank or another one has waited too long."""
    me, begin, pause = dist.get_rank(), time.monotonic(), 0.0005
    warned = timeout <= SLOW
    try:
        while not store.check([f"{key}/outcome"]) and time.monotonic() < begin + timeout:
            if not warned and time.monotonic() > begin + SLOW:
                warned = True
                logger.warning(
                    "rank %d has waited %g s in %s at %s for ranks %s, and goes on waiting for up to %g s.",
                    me,
                    SLOW,
                    what,
                    caller_line(),
                    _missing(store, key, ranks),
                    timeout,
                    extra=ANY_RANK,
                )
            time.sleep(pause)
            pause = min(2 * pause, longest_pause(len(ranks)))
    except BaseException:  # say an interrupt: no rank may go on as if this rank were here
        with contextlib.suppress(RuntimeError):
            _decide(store, key, "apart")
        raise
    if _decide(store, key, "apart") == "apart":
        raise MissingRankError(
            f"rank {me} waited {timeout:g} s in {what} at {caller_line()} for ranks {_missing(store, key, ranks)}. It is "
            "collective: call it on every rank, with the same settings, and see whether it failed there."
        )


def _missing(store: Any, key: str, ranks: list[int]) -> list[int]:
    arrived = _texts(store, key)
    return [rank for rank in ranks if rank not in arrived]
