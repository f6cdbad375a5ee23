"""What hybrid strategies refuse, and ranks that stay away."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import torch_shard
from tests.compat.harness import MLP, batch, loss_of, train_both
from tests.hybrid.harness import TWO
from tests.support.ranks import ranks
from torch_shard.errors import ConfigError, DivergenceError, MissingRankError, SetupError, ShardError


@ranks(4)
def test_bad_settings_are_refused_by_name(rank):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    flat = init_device_mesh("cpu", (4,))
    cases: list[tuple[dict[str, Any], str]] = [
        ({"strategy": "hybrid_shard", "shard_size": 3}, "shard_size is 3, which does not divide the 4 ranks"),
        ({"strategy": "full_shard", "shard_size": 2}, "shard_size is for the hybrid strategies"),
        ({"strategy": "hybrid_shard", "shard_size": 0}, "shard_size must be an integer of at least 1"),
        ({"strategy": "hybrid_shard", "shard_size": 4, "mesh": mesh}, "shard_size is 4, and in the mesh 2 ranks share"),
        ({"mesh": mesh}, "2 dimensions.*'replicate', 'shard'.*name the one to shard over"),
        ({"mesh": init_device_mesh("cpu", (2, 2))}, "2 dimensions"),
        ({"mesh": mesh, "mesh_dims": "tp"}, "has no dimension 'tp', but .'replicate', 'shard'."),
        ({"mesh": mesh, "mesh_dims": ("replicate", "shard")}, "takes one; name the one to shard over"),
        ({"mesh_dims": "shard"}, "mesh_dims names dimensions of a DeviceMesh"),
        ({"mesh_dims": 3}, "mesh_dims must be the name of a dimension"),
        ({"mesh": flat, "mesh_dims": "shard"}, "no names"),
        (
            {"strategy": "hybrid_shard", "shard_size": 1, "quantized": torch_shard.Quantized("int8")},
            "each rank holds all parameters",
        ),
        ({"mesh": (dist.group.WORLD, dist.group.WORLD)}, "a pair of process groups, which a hybrid strategy needs"),
    ]
    for settings, message in cases:
        model = MLP()
        with pytest.raises(ShardError, match=message):
            torch_shard.shard(model, **settings)
        assert not any(isinstance(p, torch_shard.ShardTensor) for p in model.parameters())


@ranks(4)
def test_ranks_with_different_copies_are_told_so(rank):
    with pytest.raises(ConfigError, match="shard_size differs between the ranks: rank 0: shard_size is 2; rank 1:"):
        torch_shard.shard(MLP(), strategy="hybrid_shard", shard_size=2 if rank == 0 else 4, timeout=10.0)
    with pytest.raises(ConfigError, match="strategy differs between the ranks"):
        torch_shard.shard(MLP(), strategy="hybrid_shard" if rank else "full_shard", shard_size=2 if rank else None)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    dims = ("replicate", "shard") if rank < 2 else ("shard", "replicate")
    with pytest.raises(
        ConfigError, match=r"which ranks share a replica .* differs between the ranks: rank 0: 0 1 . 2 3"
    ):
        torch_shard.shard(MLP(), strategy="hybrid_shard", mesh=mesh, mesh_dims=dims, timeout=10.0)
    train_both(MLP, rank, 4, steps=1, **TWO)  # and the groups are usable


@pytest.mark.exhaustive
@ranks(4, fresh=True, timeout=60)
def test_a_copy_that_stays_away_is_an_error_on_the_others(rank):
    model = MLP()
    torch_shard.shard(model, timeout=3.0, **TWO)
    if rank < 2:
        with pytest.raises((MissingRankError, DivergenceError), match=r"rank [23]"):
            loss_of(model(batch(rank, 0).float())).backward()
    else:
        time.sleep(6.0)


@pytest.mark.exhaustive
@ranks(4, fresh=True, timeout=60)
def test_ranks_of_a_mesh_that_stay_away_are_missed_in_time(rank):
    shard = [dist.new_group([0, 1]), dist.new_group([2, 3])][rank // 2]
    replicate = [dist.new_group([0, 2]), dist.new_group([1, 3])][rank % 2]
    for mesh in ((shard, replicate), DeviceMesh("cpu", [[0, 1]], mesh_dim_names=("replicate", "shard"))):
        if rank == 1:
            time.sleep(8.0)
        elif rank == 3 or (rank == 0 and not isinstance(mesh, tuple)):
            begin = time.monotonic()
            with pytest.raises(SetupError if rank == 3 and not isinstance(mesh, tuple) else MissingRankError):
                torch_shard.shard(MLP(), strategy="hybrid_shard", mesh=mesh, timeout=2.0)
            assert time.monotonic() - begin < 6.0


@ranks(4)
def test_a_rank_outside_the_mesh_is_told_so(rank):
    mesh = DeviceMesh("cpu", [[0, 1], [2, 3]][:1], mesh_dim_names=("replicate", "shard"))
    if rank > 1:
        with pytest.raises(SetupError, match=f"rank {rank} is not in it"):
            torch_shard.shard(MLP(), strategy="hybrid_shard", mesh=mesh)
    else:
        torch_shard.shard(MLP(), strategy="hybrid_shard", mesh=mesh)


@pytest.mark.exhaustive
@ranks(4, fresh=True, timeout=60)
def test_copies_that_run_different_units_are_told_apart(rank):
    model = MLP()
    torch_shard.shard(model, unit_bytes=300, timeout=10.0, **TWO)
    with pytest.raises(DivergenceError, match="ranks ran different units"):
        (model.blocks[0] if rank < 2 else model.blocks[1])(torch.ones(2, 7))
        loss_of(model(batch(rank, 0).float())).backward()
