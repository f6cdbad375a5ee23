"""Which ranks hold the shards of one replica of the parameters, and which hold the same shard of another replica.

This module has integers only.

::

    full_shard, 4 ranks        hybrid_shard, 2 nodes of 2            no_shard, 4 ranks

    replica 0: [ 0  1  2  3 ]  replica 0: [ 0  1 ]  inside a node    replica 0: [ 0 ]
                               replica 1: [ 2  3 ]                   replica 1: [ 1 ]
                                            |  |   between nodes     replica 2: [ 2 ]
                                                                     replica 3: [ 3 ]

The ranks of a row share a replica (a shard group): they all-gather parameters and reduce-scatter gradients. The ranks of a column
have the same shard (a replica group): they all-reduce the shards of gradients. Ranks are numbered within the engine's group. The
scheme is that of MiCS (Zhang et al., 2022) and of FSDP's HYBRID_SHARD.

With tensor parallelism each rank of a tensor-parallel group computes with another part of the parameters. The ranks that compute
with the same parts are a data-parallel group, called a *plane* here. Each plane is sharded, or replicated, as above::

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
    """The ranks of an engine, as rows (shard groups) of equal length.

    Attributes:
        rows: the ranks of each row, in ascending order. Each rank is in one row, and the rows of a plane follow each other.
        planes: the number of data-parallel groups, which have equally many rows.
    """

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
        """Return a topology with one replica, sharded over all ranks."""
        return cls((tuple(range(world)),))

    @classmethod
    def replicated(cls, world: int) -> Topology:
        """Return a topology with a full replica on each rank."""
        return cls(tuple((rank,) for rank in range(world)))

    @classmethod
    def hybrid(cls, world: int, size: int) -> Topology:
        """Return a topology in which each `size` consecutive ranks share a replica; `size` must divide `world`."""
        return cls(tuple(tuple(range(start, start + size)) for start in range(0, world, size)))

    @classmethod
    def of_ranks(cls, rows: Sequence[Sequence[int]], ranks: Sequence[int]) -> Topology:
        """Make a topology from the global ranks of each replica.

        Args:
            rows: the global ranks of each replica.
            ranks: the global ranks of the engine's group, in the group's order.
        """
        at = {rank: i for i, rank in enumerate(ranks)}
        return cls(tuple(tuple(at[rank] for rank in row) for row in rows))

    def within(self, planes: Sequence[Sequence[int]], ranks: Sequence[int]) -> Topology:
        """Return a topology in which each plane is divided as this topology divides the ranks of one plane.

        Args:
            planes: the global ranks of each plane, all in the same order.
            ranks: the global ranks of the engine's group, in the group's order.
        """
        at = {rank: i for i, rank in enumerate(ranks)}
        rows = tuple(tuple(at[plane[i]] for i in row) for plane in planes for row in self.rows)
        return Topology(rows, len(planes))

    def __str__(self) -> str:
        planes = [self.rows[i : i + self.replicas] for i in range(0, len(self.rows), self.replicas)]
        return " / ".join(" | ".join(" ".join(map(str, row)) for row in plane) for plane in planes)

    @property
    def world(self) -> int:
        """The number of all ranks."""
        return sum(map(len, self.rows))

    @property
    def size(self) -> int:
        """The number of ranks that share a replica."""
        return len(self.rows[0])

    @property
    def replicas(self) -> int:
        """The number of replicas in each plane."""
        return len(self.rows) // self.planes

    @property
    def averaged(self) -> int:
        """The number of ranks whose gradients are averaged, which are the ranks of a plane."""
        return self.size * self.replicas

    @property
    def is_hybrid(self) -> bool:
        """Return True if there are several replicas, and each of them is sharded."""
        return self.size > 1 and self.replicas > 1

    def row_of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that share a replica with `rank` (its shard group)."""
        return next(row for row in self.rows if rank in row)

    def column_of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that have the same shard as `rank` (its replica group), one of each replica of its plane."""
        position = self.row_of(rank).index(rank)
        return tuple(sorted(row[position] for row in self._plane_rows(rank)))

    def plane_of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that compute with the same parts as `rank` (its data-parallel group)."""
        return tuple(sorted(member for row in self._plane_rows(rank) for member in row))

    def whole_of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that together have one replica of all parts, `rank` among them: a row of each plane."""
        number = self.rows.index(self.row_of(rank)) % self.replicas
        return tuple(sorted(member for row in self.rows[number :: self.replicas] for member in row))

    def lane_of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks with the same shard as `rank` of parameters that are equal in all planes."""
        position = self.row_of(rank).index(rank)
        return tuple(sorted(row[position] for row in self.rows))

    def part_of(self, rank: int, size: int) -> tuple[int, ...]:
        """Return the `size` neighbours in a row, `rank` among them, that keep the secondary shards of a unit."""
        row = self.row_of(rank)
        start = row.index(rank) // size * size
        return row[start : start + size]

    def _plane_rows(self, rank: int) -> tuple[tuple[int, ...], ...]:
        first = self.rows.index(self.row_of(rank)) // self.replicas * self.replicas
        return self.rows[first : first + self.replicas]

    def positions(self) -> tuple[int, ...]:
        """Return the number of each rank's shard, by rank."""
        found = {rank: position for row in self.rows for position, rank in enumerate(row)}
        return tuple(found[rank] for rank in range(self.world))
