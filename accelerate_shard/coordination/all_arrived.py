"""Whether all ranks have come to the same place, where some of them may never come: through the store, and not for long."""

from __future__ import annotations

import time

import torch.distributed as dist

from torch_shard.frontend import default_store
from torch_shard.log import ANY_RANK, logger

__all__ = ["all_come", "count"]

SECONDS = 20.0  # that ranks which fail alike may be apart
_SLOW = 2.0
_GIVEN_UP = -(1 << 32)


def _world() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def count(what: str) -> int:
    """How often this rank has called it with `what`: a number that is equal on ranks which do so alike. Not collective."""
    if _world() == 1:
        return 0
    return int(default_store().add(f"accelerate_shard/{what}/{dist.get_rank()}", 1))


def all_come(place: str, why: str) -> bool:
    """Whether all ranks call it for `place`, none of them :data:`SECONDS` later than another. All that do get the same answer.

    Args:
        place: its name, which is used once.
        why: said in a warning where it takes more than a moment.
    """
    world, key = _world(), f"accelerate_shard/all_come/{place}"
    if world == 1:
        return True
    store, begin = default_store(), time.monotonic()
    arrived = store.add(key, 1)
    if arrived % -_GIVEN_UP == world:  # the last one decides
        store.set(f"{key}/answer", "yes" if arrived == world else "no")
    warned = False
    while not store.check([f"{key}/answer"]):
        waited = time.monotonic() - begin
        if waited > _SLOW and not warned:
            warned = True
            logger.warning(
                "rank %d: %s. It waits for up to %g s to see whether the others have failed, too.",
                dist.get_rank(),
                why,
                SECONDS,
                extra=ANY_RANK,
            )
        if waited > SECONDS:
            if store.add(key, _GIVEN_UP) % -_GIVEN_UP != world:
                return False
            begin = float("inf")  # the last one has come just now, and is about to answer
        time.sleep(0.01)
    return store.get(f"{key}/answer") == b"yes"
