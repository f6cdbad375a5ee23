"""What hybrid strategies send inside a copy and between copies."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

import torch_shard
from tests.comm.test_traffic import Collectives
from tests.compat.harness import MLP, batch, loss_of
from tests.hybrid.harness import TWO
from tests.support.marks import exhaustive
from tests.support.ranks import ranks


def _crossing(calls: Collectives, engine: torch_shard.Engine) -> tuple[int, int]:
    """Bytes in collectives of groups with ranks of both copies: all-reduces of gradients, and everything else."""
    rows = engine._runtime.collectives.topology.shard_groups
    gradients = others = 0
    for name, nbytes, dtypes, group in calls.calls:
        members = dist.get_process_group_ranks(dist.distributed_c10d._resolve_process_group(group))
        if any(set(members) <= set(row) for row in rows):
            continue
        if name == "allreduce_" and dtypes == {torch.float64}:
            gradients += nbytes
        else:
            others += nbytes
    return gradients, others


@pytest.mark.parametrize("strategy", ["hybrid_shard", *exhaustive("hybrid_shard_zero2")])
@ranks(4)
def test_across_copies_travel_gradients_alone(strategy, rank, world_size):
    torch.manual_seed(0)
    model = MLP(width=40).double()
    engine = torch_shard.shard(model, strategy=strategy, shard_size=2, unit_bytes=20000)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        loss_of(model(batch(rank, 0))).backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    own = sum(flat.shard.numel() * flat.shard.element_size() for unit in engine.units for flat in unit.flats)
    before = engine.bytes_sent_across
    with Collectives() as calls:
        step()
    gradients, others = _crossing(calls, engine)
    assert gradients == own  # the slice, once
    assert others < 1000  # comparisons of what the ranks do
    assert engine.bytes_sent_across - before == own  # an all-reduce of two ranks sends 2 * (2 - 1) / 2 of it


@pytest.mark.parametrize("strategy", ["hybrid_shard", *exhaustive("hybrid_shard_zero2", "no_shard")])
@ranks(2)
def test_all_that_is_sent_crosses_where_each_rank_has_a_copy(strategy, rank, world_size):
    """As with one rank on each node."""
    torch.manual_seed(0)
    model = MLP().double()
    size = {} if strategy == "no_shard" else {"shard_size": 1}
    engine = torch_shard.shard(model, strategy=strategy, **size)
    before = engine.statistics()
    loss_of(model(batch(rank, 0))).backward()
    step = engine.statistics().since(before)
    whole = sum(flat.shard.nbytes for unit in engine.units for flat in unit.flats)
    assert step.bytes_sent == step.bytes_sent_across == whole  # an all-reduce of two ranks sends 2 * (2 - 1) / 2 of it


@ranks(4)
def test_each_rank_holds_the_slices_of_its_copy(rank, world_size):
    model = MLP(width=40)
    engine = torch_shard.shard(model, unit_bytes=20000, **TWO)
    numel = sum(p.numel() for p in model.parameters())
    own = sum(p.to_local().numel() for p in model.parameters())
    assert numel / 2 - 100 < own < numel / 2 + 100
    assert engine.world_size == 4 and engine.rank == rank
    assert dist.get_process_group_ranks(engine.shard_group) == [0, 1] if rank < 2 else [2, 3]
