"""Which rank steps which parameter of an optimizer that works on whole matrices.

Pure integers: no tensors, no communication; every rank computes the same answer. Ownership is what the sharded Shampoo and
Muon optimizers do (arXiv 2309.06497, arXiv 2502.16982, and the reference code of DION, arXiv 2504.05295): the work on one
matrix is not divided, the matrices are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..utils.weak_id_map import ByObject

__all__ = ["Item", "OwnerMaps", "assign", "choose", "loads_of", "work_of"]

_PULL = 0.1  # how much a difference in load counts against the work whose parameter need not be moved


@dataclass(frozen=True)
class Item:
    """A parameter that needs an owner.

    Attributes:
        work: what a step on it costs, in any unit.
        stage: parameters of one stage are exchanged together; the ranks go through the stages in order.
        held: elements that each rank holds.
    """

    work: int
    stage: int = 0
    held: tuple[int, ...] = ()


def work_of(shape: Sequence[int], linear: bool = False) -> int:
    """What a step costs: for a matrix (rows, columns) a product with its smaller side, for everything else its elements.

    Args:
        shape: of the parameter; more than two dimensions count as a matrix of ``shape[0]`` rows.
        linear: the optimizer makes no matrix products (Adafactor).
    """
    numel = math.prod(shape)
    if linear or len(shape) < 2 or not numel:
        return numel
    return numel * min(shape[0], numel // shape[0]) + numel


def assign(items: Sequence[Item], ranks: int, loads: Sequence[int] = ()) -> list[int]:
    """An owner for each item: where most of it is already, as far as the work stays balanced.

    Ranks go through the stages nearly in step, so they shall not only end together but be level on the way: up to each stage
    no rank is given more than its share and half of what it has in that stage, and nothing beyond its share of the whole.
    Within that, a rank that holds all of a parameter need neither receive nor send it. What fits nowhere goes to the rank
    with least work, and items of more than half a share do so before all others. (Longest-processing-time-first over all
    stages, the textbook's choice, ends as level, but does not ask what has to be moved.)

    Args:
        items: in any order that all ranks share.
        ranks: how many there are.
        loads: work that each rank has already.

    Returns:
        The rank of each item: none has more than the mean and one item, unless it had before. The same for the same
        arguments.
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
    """The work that each rank has: that of the parameters in `work` which have an owner."""
    total = [0] * ranks
    for name, amount in work.items():
        if name in owners:
            total[owners[name]] += amount
    return total


def choose(holders: Sequence[int], owner: int | None, ranks: int) -> int | None:
    """The owner of a parameter of which these ranks have state: it must be one that has.

    Args:
        holders: the ranks that have state of it, in ascending order.
        owner: the present owner, if there is one.
        ranks: how many there are.

    Returns:
        The owner, None where any rank would do.
    """
    if not holders:
        return owner
    if owner is not None:
        return owner if owner in holders else holders[0]
    return None if len(holders) == ranks else holders[0]


class OwnerMaps:
    """The owners, by the parameters' names, of each optimizer that has some. Equal on all ranks.

    An owner stays once there is one: the state is there.
    """

    def __init__(self) -> None:
        self._maps: ByObject[dict[str, int]] = ByObject()

    def __contains__(self, optimizer: Any) -> bool:
        return self._maps.get(optimizer) is not None

    def of(self, optimizer: Any) -> dict[str, int]:
        found = self._maps.get(optimizer)
        if found is None:
            found = {}
            self._maps.set(optimizer, found)
        return found

    def optimizers(self) -> list[Any]:
        """Those that have owners, and live."""
        return [optimizer for optimizer, owners in self._maps.items() if owners]
