"""Which ranks hold the shards of one replica of the parameters, and which hold the same shard of another replica.

This module has integers only.

::

    full_shard, 4 ranks        hybrid_shard, 2 nodes of 2            no_shard, 4 ranks

    replica 0: [ 0  1  2  3 ]  replica 0: [ 0  1 ]  inside a node    replica 0: [ 0 ]
                               replica 1: [ 2  3 ]                   replica 1: [ 1 ]
                                            |  |   between nodes     replica 2: [ 2 ]
                                                                     replica 3: [ 3 ]

Each row of the figure is a shard group, whose ranks share one replica: they all-gather parameters and reduce-scatter gradients.
Each column is a replica group, whose ranks have the same shard: they all-reduce the shards of gradients. Ranks are numbered
within the engine's group. The scheme is that of MiCS (Zhang et al., 2022) and of FSDP's HYBRID_SHARD.

With tensor parallelism each rank of a tensor-parallel group computes with another part of the parameters. The ranks that compute
with the same parts are a data-parallel group. Each of these groups is sharded, or replicated, as above::

    full_shard, mesh (dp=2, tp=2)          hybrid_shard, mesh (2, 2, tp=2)

    group 0: [ 0  2 ]                      group 0: [ 0  2 ]  [ 4  6 ]
    group 1: [ 1  3 ]                      group 1: [ 1  3 ]  [ 5  7 ]
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..errors import SetupError


@dataclass(frozen=True)
class Topology:
    """The ranks of an engine, as shard groups of equal size.

    Attributes:
        shard_groups: the ranks of each shard group, in ascending order. Each rank is in one of them, and those of one
            data-parallel group follow each other.
        data_parallel_groups: the number of data-parallel groups, which have equally many shard groups.
    """

    shard_groups: tuple[tuple[int, ...], ...]
    data_parallel_groups: int = 1

    def __post_init__(self) -> None:
        if self.data_parallel_groups < 1 or len(self.shard_groups) % self.data_parallel_groups:
            raise SetupError(
                f"mesh: {len(self.shard_groups)} replicas of the parameters can't be divided equally among "
                f"{self.data_parallel_groups} data-parallel groups."
            )
        if len({len(group) for group in self.shard_groups}) != 1 or not self.shard_groups[0]:
            raise SetupError(f"mesh: the replicas of the parameters are on different numbers of ranks: {self}.")
        if sorted(rank for group in self.shard_groups for rank in group) != list(range(self.world)):
            raise SetupError(f"mesh: the replicas of the parameters don't have each rank once: {self}.")
        # A process group numbers its ranks in ascending order.
        object.__setattr__(self, "shard_groups", tuple(tuple(sorted(group)) for group in self.shard_groups))

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
    def of_ranks(cls, shard_groups: Sequence[Sequence[int]], ranks: Sequence[int]) -> Topology:
        """Make a topology from the global ranks of each replica.

        Args:
            shard_groups: the global ranks of each replica.
            ranks: the global ranks of the engine's group, in the group's order.
        """
        at = {rank: i for i, rank in enumerate(ranks)}
        return cls(tuple(tuple(at[rank] for rank in group) for group in shard_groups))

    def within(self, data_parallel_groups: Sequence[Sequence[int]], ranks: Sequence[int]) -> Topology:
        """Return a topology in which each data-parallel group is divided as this topology divides the ranks of one.

        Args:
            data_parallel_groups: the global ranks of each group, all in the same order.
            ranks: the global ranks of the engine's group, in the group's order.
        """
        at = {rank: i for i, rank in enumerate(ranks)}
        shard_groups = tuple(
            tuple(at[group[i]] for i in shard_group)
            for group in data_parallel_groups
            for shard_group in self.shard_groups
        )
        return Topology(shard_groups, len(data_parallel_groups))

    def __str__(self) -> str:
        groups = [self.shard_groups[i : i + self.replicas] for i in range(0, len(self.shard_groups), self.replicas)]
        return " / ".join(" | ".join(" ".join(map(str, shard_group)) for shard_group in group) for group in groups)

    @property
    def world(self) -> int:
        """The number of all ranks."""
        return sum(map(len, self.shard_groups))

    @property
    def size(self) -> int:
        """The number of ranks that share a replica."""
        return len(self.shard_groups[0])

    @property
    def replicas(self) -> int:
        """The number of replicas in each data-parallel group."""
        return len(self.shard_groups) // self.data_parallel_groups

    @property
    def data_parallel_size(self) -> int:
        """The number of ranks whose gradients are averaged, which are the ranks of a data-parallel group."""
        return self.size * self.replicas

    @property
    def is_hybrid(self) -> bool:
        """True if there are several replicas, and each of them is sharded."""
        return self.size > 1 and self.replicas > 1

    def shard_group_of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that share a replica with `rank` (its shard group)."""
        return next(group for group in self.shard_groups if rank in group)

    def replica_group_of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that have the same shard as `rank` in its data-parallel group (its replica group)."""
        position = self.shard_group_of(rank).index(rank)
        return tuple(sorted(group[position] for group in self._shard_groups_beside(rank)))

    def data_parallel_group_of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that compute with the same parts as `rank` (its data-parallel group)."""
        return tuple(sorted(member for group in self._shard_groups_beside(rank) for member in group))

    def full_model_group_of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks that together have one replica of all parts: `rank`'s shard group, and those beside it."""
        number = self.shard_groups.index(self.shard_group_of(rank)) % self.replicas
        return tuple(sorted(member for group in self.shard_groups[number :: self.replicas] for member in group))

    def tp_replica_group_of(self, rank: int) -> tuple[int, ...]:
        """Return the ranks with the same shard as `rank` of parameters that are equal in all data-parallel groups."""
        position = self.shard_group_of(rank).index(rank)
        return tuple(sorted(group[position] for group in self.shard_groups))

    def secondary_group_of(self, rank: int, size: int) -> tuple[int, ...]:
        """Return the `size` neighbours in a shard group, `rank` among them, that keep the secondary shards of a unit."""
        group = self.shard_group_of(rank)
        start = group.index(rank) // size * size
        return group[start : start + size]

    def _shard_groups_beside(self, rank: int) -> tuple[tuple[int, ...], ...]:
        first = self.shard_groups.index(self.shard_group_of(rank)) // self.replicas * self.replicas
        return self.shard_groups[first : first + self.replicas]

    def positions(self) -> tuple[int, ...]:
        """Return the number of each rank's shard, by rank."""
        found = {rank: position for group in self.shard_groups for position, rank in enumerate(group)}
        return tuple(found[rank] for rank in range(self.world))
