"""Which ranks share a copy."""

from __future__ import annotations

import pytest
import torch
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import torch_shard
from tests.compat.harness import MLP, train_both
from tests.hybrid.harness import same_copies
from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from torch_shard.errors import ConfigError, ShardError
from torch_shard.layout.rank_topology import Topology


def _shard_groups(engine: torch_shard.Engine) -> tuple[tuple[int, ...], ...]:
    return engine._runtime.collectives.topology.shard_groups


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
