"""The assignment of parameters to the ranks that step them, for optimizers that work on full matrices.

This module has integers only, without tensors and communication, and every rank computes the same result. As in the sharded
Shampoo and Muon optimizers (arXiv 2309.06497, arXiv 2502.16982, and the reference code of DION, arXiv 2504.05295), the work on
one matrix is not divided among ranks; the matrices are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

_PULL = 0.1  # the weight of a difference in load against the work on parameters that need not be moved


class Item(NamedTuple):
    """A parameter that needs an owner.

    Attributes:
        work: the cost of a step on the parameter, in any unit.
        stage: the number of its stage. The parameters of a stage are exchanged together, and stages follow each other.
        held: the number of its elements that each rank holds.
    """

    work: int
    stage: int = 0
    held: tuple[int, ...] = ()


def work_of(shape: Sequence[int], linear: bool = False) -> int:
    """Return the cost of a step: for a matrix that of a product with its smaller side, else the number of elements.

    Args:
        shape: the shape of the parameter. With more than two dimensions it counts as a matrix of ``shape[0]`` rows.
        linear: True if the optimizer makes no matrix products (Adafactor).
    """
    numel = math.prod(shape)
    if linear or len(shape) < 2 or not numel:
        return numel
    return numel * min(shape[0], numel // shape[0]) + numel


def assign(items: Sequence[Item], ranks: int, loads: Sequence[int] = ()) -> list[int]:
    """Return an owner for each item: the rank that holds most of it, as far as the work stays balanced.

    Ranks go through the stages nearly in step, so the work must be balanced up to each stage, not only at the end. Up to a
    stage, a rank is given at most its share of the work and half of its share in that stage, and never more than its share
    of the total. Within these limits a parameter goes to the rank that holds most of it, because less has to be moved. An
    item that fits nowhere goes to the rank with the least work, and items of more than half a share are assigned in this way
    before all others. (Longest-processing-time-first over all stages, the textbook's choice, balances the end as well, but
    ignores what has to be moved.)

    Args:
        items: the items, in the same order on all ranks.
        ranks: the number of ranks.
        loads: the work that each rank has already.

    Returns:
        The rank of each item. No rank has more work than the mean and one item, unless it had more before. Equal arguments
        give equal results.
    """
    total = list(loads) or [0] * ranks
    owners = [0] * len(items)
    share = (sum(total) + sum(item.work for item in items)) / ranks

    def give(i: int, among: Sequence[int]) -> None:
        item, least = items[i], min(total)
        held = item.held or (0,) * ranks
        near = item.work / max(1, sum(held))
        rank = min(among, key=lambda r: (_PULL * (total[r] - least) - near * held[r], total[r], r))
        owners[i] = rank
        total[rank] += item.work

    def give_to_least(i: int) -> None:
        least = min(total)
        give(i, [r for r in range(ranks) if total[r] == least])

    large = sorted((i for i, item in enumerate(items) if 2 * item.work > share), key=lambda i: (-items[i].work, i))
    for i in large:
        give_to_least(i)
    rest = sorted(set(range(len(items))) - set(large), key=lambda i: (items[i].stage, -items[i].work, i))
    left = sum(items[i].work for i in rest)
    for _, group in itertools.groupby(rest, key=lambda i: items[i].stage):
        stage = list(group)
        work = sum(items[i].work for i in stage)
        left -= work
        limit = share - left / ranks + min(work / 2, left) / ranks
        for i in stage:
            room = [r for r in range(ranks) if total[r] + items[i].work <= limit]
            if room:
                give(i, room)
            else:
                give_to_least(i)
    return owners


def loads_of(work: Mapping[str, int], owners: Mapping[str, int], ranks: int) -> list[int]:
    """Return the work of each rank: the sum over the parameters in `work` that it owns."""
    total = [0] * ranks
    for name, amount in work.items():
        if name in owners:
            total[owners[name]] += amount
    return total


def choose(holders: Sequence[int], owner: int | None, ranks: int) -> int | None:
    """Return the owner of a parameter whose optimizer state is on the ranks `holders`: one of these ranks.

    Args:
        holders: the ranks that have the state, in ascending order.
        owner: the present owner, if there is one.
        ranks: the number of ranks.

    Returns:
        The owner; None if any rank may be the owner.
    """
    if not holders:
        return owner
    if owner is not None:
        return owner if owner in holders else holders[0]
    return None if len(holders) == ranks else holders[0]
