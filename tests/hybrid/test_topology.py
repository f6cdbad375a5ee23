"""Which ranks share a replica, and what they send inside it and to other replicas."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import torch_shard
from tests.compat.harness import MLP, batch, loss_of, train_both
from tests.hybrid.harness import TWO, same_copies
from tests.support.collectives import Collectives
from tests.support.inside import runtime_of
from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from torch_shard.errors import ConfigError, ShardError
from torch_shard.layout.rank_topology import Topology


def _shard_groups(engine: torch_shard.Engine) -> tuple[tuple[int, ...], ...]:
    return runtime_of(engine).collectives.topology.shard_groups


@ranks(4)
def test_a_mesh_of_two_dimensions_has_copies_and_slices(rank, world_size):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    engine = torch_shard.shard(MLP(), strategy="hybrid_shard", mesh=mesh)
    assert _shard_groups(engine) == ((0, 1), (2, 3))
    other = torch_shard.shard(MLP(), strategy="hybrid_shard", mesh=mesh, mesh_dims=("shard", "replicate"))
    assert _shard_groups(other) == ((0, 2), (1, 3))
    groups = mesh.get_group("shard"), mesh.get_group("replicate")
    third = torch_shard.shard(MLP(), strategy="hybrid_shard", mesh=groups)
    assert _shard_groups(third) == ((0, 1), (2, 3))
    named = torch_shard.shard(MLP(), mesh=mesh, mesh_dims="shard")
    assert named.world_size == 2


@pytest.mark.exhaustive
@ranks(4)
def test_copies_on_ranks_that_are_not_consecutive_train_like_plain(rank, world_size):
    odd = DeviceMesh("cpu", [[0, 3], [1, 2]], mesh_dim_names=("replicate", "shard"))
    groups = odd.get_group("shard"), odd.get_group("replicate")
    pair = train_both(MLP, rank, world_size, steps=2, strategy="hybrid_shard", mesh=groups)
    assert _shard_groups(pair.engine) == ((0, 3), (1, 2))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("slices", "copies"))
    pair = train_both(MLP, rank, world_size, strategy="hybrid_shard", mesh=mesh, mesh_dims=("copies", "slices"))
    same_copies(pair.engine)
    assert _shard_groups(pair.engine) == ((0, 2), (1, 3))


@pytest.mark.exhaustive
@ranks(4, fresh=True)
def test_the_ranks_of_a_node_share_a_copy_by_default(rank):
    import os

    os.environ["LOCAL_WORLD_SIZE"] = "2"
    assert _shard_groups(torch_shard.shard(MLP(), strategy="hybrid_shard")) == ((0, 1), (2, 3))
    os.environ["LOCAL_WORLD_SIZE"] = "4"  # one node: one copy
    assert _shard_groups(torch_shard.shard(MLP(), strategy="hybrid_shard")) == ((0, 1, 2, 3),)
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    assert _shard_groups(torch_shard.shard(MLP(), strategy="hybrid_shard")) == ((0,), (1,), (2,), (3,))
    os.environ["LOCAL_WORLD_SIZE"] = "3"
    with pytest.raises(ConfigError, match=r"with 3 ranks to a node, the ranks .* are not as many on each"):
        torch_shard.shard(MLP(), strategy="hybrid_shard")
    del os.environ["LOCAL_WORLD_SIZE"]
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match=r"how many ranks a node has is not known.*pass shard_size="):
            torch_shard.shard(MLP(), strategy="hybrid_shard")


@pytest.mark.parametrize("size", [1, *exhaustive(4)])
@ranks(4)
def test_a_copy_on_one_rank_or_on_all_trains_like_plain(size, rank, world_size):
    train_both(MLP, rank, world_size, strategy="hybrid_shard", shard_size=size, precision=None)


@ranks(1)
def test_one_rank_alone(rank, world_size):
    train_both(MLP, rank, world_size, strategy="hybrid_shard")


def test_a_topology_has_each_rank_once():
    assert Topology.hybrid(6, 2).shard_groups == ((0, 1), (2, 3), (4, 5))
    assert Topology.hybrid(6, 2).replica_group_of(3) == (1, 3, 5)
    assert Topology(((5, 1), (0, 3), (4, 2))).shard_groups == ((1, 5), (0, 3), (2, 4))
    assert Topology(((1, 5), (0, 3), (2, 4))).positions() == (0, 0, 0, 1, 1, 1)
    assert Topology.sharded(3).shard_group_of(2) == (0, 1, 2) and Topology.replicated(3).shard_group_of(2) == (2,)
    for groups in (((0, 1), (2,)), ((0, 1), (1, 2)), ((0, 2),), ((),)):
        with pytest.raises(ShardError, match="mesh"):
            Topology(groups)


# -- what they send ------------------------------------------------------------------------------------------------------


def _crossing(calls: Collectives, engine: torch_shard.Engine) -> tuple[int, int]:
    """Bytes in collectives of groups with ranks of both copies: all-reduces of gradients, and everything else."""
    rows = runtime_of(engine).collectives.topology.shard_groups
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
