"""Which ranks hold the slices of one copy of the parameters, and which hold the same slice of another copy. Integers only.

::

    full_shard, 4 ranks        hybrid_shard, 2 nodes of 2            no_shard, 4 ranks

    copy 0: [ 0  1  2  3 ]     copy 0: [ 0  1 ]  inside a node       copy 0: [ 0 ]
                               copy 1: [ 2  3 ]                      copy 1: [ 1 ]
                                         |  |    across nodes        copy 2: [ 2 ]
                                                                     copy 3: [ 3 ]

Rows gather parameters and reduce-scatter gradients; columns all-reduce the slices of gradients. Ranks are numbered within the
engine's group. The scheme is that of MiCS (Zhang et al., 2022) and of FSDP's HYBRID_SHARD.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from .errors import SetupError

__all__ = ["Topology"]


@dataclass(frozen=True)
class Topology:
    """The ranks of an engine as rows of equal length; each rank is in one row, in ascending order."""

    rows: tuple[tuple[int, ...], ...]

    def __post_init__(self) -> None:
        if len({len(row) for row in self.rows}) != 1 or not self.rows[0]:
            raise SetupError(f"mesh: the copies of the parameters are on different numbers of ranks: {self}.")
        if sorted(rank for row in self.rows for rank in row) != list(range(self.world)):
            raise SetupError(f"mesh: the copies of the parameters don't have each rank once: {self}.")
        # A process group numbers its ranks in ascending order.
        object.__setattr__(self, "rows", tuple(tuple(sorted(row)) for row in self.rows))

    @classmethod
    def sharded(cls, world: int) -> Topology:
        """One copy over all ranks."""
        return cls((tuple(range(world)),))

    @classmethod
    def replicated(cls, world: int) -> Topology:
        """A copy on each rank."""
        return cls(tuple((rank,) for rank in range(world)))

    @classmethod
    def hybrid(cls, world: int, size: int) -> Topology:
        """A copy on each `size` consecutive ranks, which divides `world`."""
        return cls(tuple(tuple(range(start, start + size)) for start in range(0, world, size)))

    @classmethod
    def of_ranks(cls, rows: Sequence[Sequence[int]], ranks: Sequence[int]) -> Topology:
        """From the global ranks of each copy; `ranks` are those of the engine's group, in its order."""
        at = {rank: i for i, rank in enumerate(ranks)}
        return cls(tuple(tuple(at[rank] for rank in row) for row in rows))

    def __str__(self) -> str:
        return " | ".join(" ".join(map(str, row)) for row in self.rows)

    @property
    def world(self) -> int:
        """All ranks."""
        return sum(map(len, self.rows))

    @property
    def size(self) -> int:
        """Ranks that share one copy."""
        return len(self.rows[0])

    @property
    def replicas(self) -> int:
        """Copies."""
        return len(self.rows)

    @property
    def is_hybrid(self) -> bool:
        """Whether there are several copies, and each of them is cut."""
        return 1 < self.size < self.world

    def row_of(self, rank: int) -> tuple[int, ...]:
        """The ranks that have the slices of the copy that `rank` has one of."""
        return next(row for row in self.rows if rank in row)

    def column_of(self, rank: int) -> tuple[int, ...]:
        """The ranks that have the slice that `rank` has, one of each copy."""
        position = self.row_of(rank).index(rank)
        return tuple(sorted(row[position] for row in self.rows))

    def part_of(self, rank: int, size: int) -> tuple[int, ...]:
        """The `size` neighbours in its row, `rank` among them, that keep a unit between forward and backward."""
        row = self.row_of(rank)
        start = row.index(rank) // size * size
        return row[start : start + size]

    def positions(self) -> tuple[int, ...]:
        """By rank, which slice it has."""
        found = {rank: position for row in self.rows for position, rank in enumerate(row)}
        return tuple(found[rank] for rank in range(self.world))
