"""The engine's process groups: made once, and gone without waiting for collectives that will never end."""

from __future__ import annotations

import gc
import time
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.support.ranks import ranks
from torch_shard import shard
from torch_shard.comm.communicators import connect
from torch_shard.comm.process_groups import group_timeout
from torch_shard.errors import SetupError
from torch_shard.layout.rank_topology import Topology


def _connect(group):
    return connect(group, torch.device("cpu"), Topology.sharded(2), timeout=30.0, single_communicator=False)


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


def test_without_torch_distributed_a_group_would_wait_for_torchs_default(monkeypatch):
    expected = group_timeout(torch.device("cpu"))
    assert expected == dist.distributed_c10d.default_pg_timeout.total_seconds()
    built_without = SimpleNamespace(is_available=lambda: False)  # as torch.distributed is there: it has little else
    monkeypatch.setattr("torch_shard.comm.process_groups.dist", built_without)
    assert group_timeout(torch.device("cpu")) == expected


@ranks(2)
def test_engines_over_one_group_share_their_process_groups():
    before = len(dist.distributed_c10d._world.pg_map)
    engines = [shard(nn.Linear(4, 4)) for _ in range(3)]
    made = len(dist.distributed_c10d._world.pg_map) - before
    assert made <= 4 and len(engines) == 3
    assert engines[0]._runtime.collectives.gather_channel.group is engines[2]._runtime.collectives.gather_channel.group


@ranks(2)
def test_a_group_that_this_rank_is_no_member_of_is_an_error(rank):
    group = dist.new_group([0])
    if rank == 0:
        shard(nn.Linear(4, 4), mesh=group)
    else:
        with pytest.raises(SetupError, match="rank 1 is not a member"):
            shard(nn.Linear(4, 4), mesh=group)
