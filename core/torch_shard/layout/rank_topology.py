"""Which ranks hold the slices of one copy of the parameters, and which hold the same slice of another copy. Integers only.

::

    full_shard, 4 ranks        hybrid_shard, 2 nodes of 2            no_shard, 4 ranks

    copy 0: [ 0  1  2  3 ]     copy 0: [ 0  1 ]  inside a node       copy 0: [ 0 ]
                               copy 1: [ 2  3 ]                      copy 1: [ 1 ]
                                         |  |    across nodes        copy 2: [ 2 ]
                                                                     copy 3: [ 3 ]

Rows gather parameters and reduce-scatter gradients; columns all-reduce the slices of gradients. Ranks are numbered within the
engine's group. The scheme is that of MiCS (Zhang et al., 2022) and of FSDP's HYBRID_SHARD.

With tensor parallelism each rank of a tensor-parallel group computes with another part of the parameters. Ranks that compute with
the same parts are a *plane*; each is cut, or copied, as above::

    full_shard, mesh (dp=2, tp=2)          hybrid_shard, mesh (2, 2, tp=2)

    plane 0: [ 0  2 ]                      plane 0: [ 0  2 ]  [ 4  6 ]
    plane 1: [ 1  3 ]                      plane 1: [ 1  3 ]  [ 5  7 ]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import SetupError

__all__ = ["Topology"]


@dataclass(frozen=True)
class Topology:
    """The ranks of an engine as rows of equal length; each rank is in one row, in ascending order. The rows of a plane follow
    each other, and all planes have as many."""

    rows: tuple[tuple[int, ...], ...]
    planes: int = 1

    def __post_init__(self) -> None:
        if self.planes < 1 or len(self.rows) % self.planes:
            raise SetupError(
                f"mesh: {len(self.rows)} copies of the parameters are not as many in each of {self.planes} planes."
            )
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

    def within(self, planes: Sequence[Sequence[int]], ranks: Sequence[int]) -> Topology:
        """The same in each plane; of this one the ranks are numbered within a plane. `planes` are the global ranks of each, in
        one order, and `ranks` as for :meth:`of_ranks`."""
        at = {rank: i for i, rank in enumerate(ranks)}
        rows = tuple(tuple(at[plane[i]] for i in row) for plane in planes for row in self.rows)
        return Topology(rows, len(planes))

    def __str__(self) -> str:
        planes = [self.rows[i : i + self.replicas] for i in range(0, len(self.rows), self.replicas)]
        return " / ".join(" | ".join(" ".join(map(str, row)) for row in plane) for plane in planes)

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
        """Copies, in each plane."""
        return len(self.rows) // self.planes

    @property
    def averaged(self) -> int:
        """Ranks whose gradients are averaged: those of a plane."""
        return self.size * self.replicas

    @property
    def is_hybrid(self) -> bool:
        """Whether there are several copies, and each of them is cut."""
        return self.size > 1 and self.replicas > 1

    def row_of(self, rank: int) -> tuple[int, ...]:
        """The ranks that have the slices of the copy that `rank` has one of."""
        return next(row for row in self.rows if rank in row)

    def column_of(self, rank: int) -> tuple[int, ...]:
        """The ranks that have the slice that `rank` has, one of each copy of its plane."""
        position = self.row_of(rank).index(rank)
        return tuple(sorted(row[position] for row in self._plane_rows(rank)))

    def plane_of(self, rank: int) -> tuple[int, ...]:
        """The ranks that compute with the parts that `rank` computes with."""
        return tuple(sorted(member for row in self._plane_rows(rank) for member in row))

    def whole_of(self, rank: int) -> tuple[int, ...]:
        """The ranks that have, together, one copy of all parts: a row of each plane."""
        number = self.rows.index(self.row_of(rank)) % self.replicas
        return tuple(sorted(member for row in self.rows[number :: self.replicas] for member in row))

    def lane_of(self, rank: int) -> tuple[int, ...]:
        """The ranks that have the slice of `rank` of what is the same in all planes."""
        position = self.row_of(rank).index(rank)
        return tuple(sorted(row[position] for row in self.rows))

    def part_of(self, rank: int, size: int) -> tuple[int, ...]:
        """The `size` neighbours in its row, `rank` among them, that keep a unit between forward and backward."""
        row = self.row_of(rank)
        start = row.index(rank) // size * size
        return row[start : start + size]

    def _plane_rows(self, rank: int) -> tuple[tuple[int, ...], ...]:
        first = self.rows.index(self.row_of(rank)) // self.replicas * self.replicas
        return self.rows[first : first + self.replicas]

    def positions(self) -> tuple[int, ...]:
        """By rank, which slice it has."""
        found = {rank: position for row in self.rows for position, rank in enumerate(row)}
        return tuple(found[rank] for rank in range(self.world))
