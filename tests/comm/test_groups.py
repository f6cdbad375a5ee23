"""The engine's process groups: what collectives on them give, and that they go without waiting for what will never end."""

from __future__ import annotations

import gc
import time
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.compat.harness import MLP, train_both
from tests.support.ranks import ranks
from torch_shard import ShardConfig, shard
from torch_shard.comm import process_group_ops
from torch_shard.comm.communicators import connect
from torch_shard.comm.mesh import Mesh
from torch_shard.errors import ConfigError, SetupError
from torch_shard.layout.rank_topology import Topology


def _connect(group):
    return connect(Mesh(group, torch.device("cpu"), Topology.sharded(2)), ShardConfig(timeout=30.0))


@ranks(2, timeout=30, group_timeout=100.0)
def test_groups_with_a_collective_that_lacks_its_partner_go_without_waiting_for_it(rank):
    mine, others = [_connect(dist.new_group([0, 1])) for _ in range(2)][:: 1 if rank == 0 else -1]
    full = torch.zeros(8)
    pending = mine.all_gather(full, mine.payload(full[:4]), "a gather of one rank")
    begin = time.monotonic()
    for user_group in list(dist.distributed_c10d._world.pg_map):
        if user_group is not dist.group.WORLD:
            dist.destroy_process_group(user_group)
    # Each rank closes its pending one first, which is idle on the other and closed second there.
    del pending, mine
    gc.collect()
    del others
    gc.collect()
    assert time.monotonic() - begin < 10


@ranks(2)
def test_a_group_that_this_rank_is_no_member_of_is_an_error(rank):
    group = dist.new_group([0])
    if rank == 0:
        shard(nn.Linear(4, 4), mesh=group)
    else:
        with pytest.raises(SetupError, match="rank 1 is not a member"):
            shard(nn.Linear(4, 4), mesh=group)


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@ranks(2)
def test_each_collective_gives_what_the_public_function_gives(dtype: torch.dtype) -> None:
    _compare(dtype)


@ranks(2)
def test_the_methods_of_older_torch_take_the_same_arguments() -> None:
    older = {
        "_ALL_GATHER": "_allgather_base",
        "_REDUCE_SCATTER": "_reduce_scatter_base",
        "_ALL_TO_ALL": "alltoall_base",
    }
    with mock.patch.multiple(process_group_ops, **older):
        _compare(torch.float32)


@pytest.mark.exhaustive
@ranks(2, fresh=True)
def test_under_detailed_debugging_a_model_trains_like_plain(rank: int, world_size: int) -> None:
    """Each group is wrapped then, and compares the ranks' calls before it runs them."""
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    train_both(MLP, rank, world_size)


def _compare(dtype: torch.dtype) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    group = dist.new_group(list(range(world)))

    def of(rank: int) -> torch.Tensor:
        return torch.arange(4).to(dtype) * (rank + 1) + (1j if dtype.is_complex else 0.5)

    mine, everyone = of(rank), [of(other) for other in range(world)]
    half, total = slice(2 * rank, 2 * rank + 2), torch.stack(everyone).sum(0)

    gathered = torch.empty(4 * world, dtype=dtype)
    process_group_ops.all_gather(group, gathered, mine).wait()
    assert torch.equal(gathered, torch.cat(everyone))
    received = torch.empty(4, dtype=dtype)
    process_group_ops.all_to_all(group, received, mine).wait()
    assert torch.equal(received, torch.cat([other[half] for other in everyone]))
    part = torch.empty(2, dtype=dtype)
    process_group_ops.reduce_scatter(group, part, mine.clone()).wait()
    assert torch.equal(part, total[half])
    slots = [mine.clone() for _ in range(world)]
    process_group_ops.broadcast_each(group, slots).wait()
    assert torch.equal(torch.stack(slots), torch.stack(everyone))
    summed = mine.clone()
    process_group_ops.all_reduce(group, summed).wait()
    assert torch.equal(summed, total)
    dist.destroy_process_group(group)


@ranks(2)
def test_memory_that_the_backend_can_not_register_is_an_error_on_all_ranks(rank):
    model = nn.Linear(4, 4)
    with pytest.raises(ConfigError, match=r"registered_memory: only NCCL .* on cpu the collectives are those of gloo"):
        shard(model, registered_memory=True)
    shard(model)
