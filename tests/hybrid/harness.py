"""Settings and comparisons for the tests of the hybrid strategies."""

from __future__ import annotations

import torch
import torch.distributed as dist

import torch_shard
from tests.support.inside import runtime_of

TWO = {"strategy": "hybrid_shard", "shard_size": 2}


def same_copies(engine: torch_shard.Engine) -> None:
    """Assert that the copies are equal, to the bit. Collective."""
    c = runtime_of(engine).collectives
    for unit in engine.units:
        for flat in unit.flats:
            everyone = [torch.empty_like(flat.shard) for _ in range(c.world)]
            dist.all_gather(everyone, flat.shard)
            for rank in c.topology.replica_group_of(c.world_rank):
                assert torch.equal(everyone[rank], flat.shard), f"unit {unit.name} differs from rank {rank}'s"
