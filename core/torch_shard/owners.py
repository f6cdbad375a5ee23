"""Which rank steps which parameter of an optimizer that works on whole matrices.

Pure integers: no tensors, no communication; every rank computes the same answer. Ownership is what the sharded Shampoo and
Muon optimizers do (arXiv 2309.06497, section 4; arXiv 2502.16982, section 2.3; DION's reference code): the work on one
matrix is not divided, the matrices are.
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

__all__ = ["Item", "OwnerMaps", "assign", "choose", "loads_of", "work_of"]


@dataclass(frozen=True)
class Item:
    """A parameter that needs an owner.

    Attributes:
        work: what a step on it costs, in any unit.
        unit: its unit's index. Ranks go through the units together, so each unit's work should be spread, too.
        held: elements that each rank holds. Of equally good owners the one that holds most has least to receive.
    """

    work: int
    unit: int = 0
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
    """An owner for each item: longest processing time first, over all units.

    No rank gets more than the mean plus one item. Equal loads, which models of repeated blocks have all the time, go to
    the rank with less work in that unit, then to the one that holds most of the parameter.

    Args:
        items: in any order that all ranks share.
        ranks: how many there are.
        loads: work that each rank has already.

    Returns:
        The rank of each item. The same for the same arguments.
    """
    total = list(loads) or [0] * ranks
    in_unit: Counter[tuple[int, int]] = Counter()
    owners = [0] * len(items)
    for i in sorted(range(len(items)), key=lambda i: (-items[i].work, i)):
        item = items[i]
        held = item.held or (0,) * ranks
        rank = min(range(ranks), key=lambda r: (total[r], in_unit[item.unit, r], -held[r], r))
        owners[i] = rank
        total[rank] += item.work
        in_unit[item.unit, rank] += item.work
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
        self._maps: weakref.WeakKeyDictionary[Any, dict[str, int]] = weakref.WeakKeyDictionary()

    def __contains__(self, optimizer: Any) -> bool:
        return optimizer in self._maps

    def of(self, optimizer: Any) -> dict[str, int]:
        return self._maps.setdefault(optimizer, {})
