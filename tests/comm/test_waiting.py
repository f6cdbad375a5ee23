"""A rank that comes late is waited for."""

from __future__ import annotations

import time

import torch
from torch import nn

import torch_shard
from tests.support.ranks import ranks
from torch_shard.comm.work import FIRST_TICK


@ranks(2)
def test_a_rank_that_comes_late_is_waited_for(rank: int) -> None:
    torch.manual_seed(0)
    model, plain = nn.Linear(3, 2), nn.Linear(3, 2)
    plain.load_state_dict(model.state_dict())
    torch_shard.shard(model, timeout=60.0)
    if rank == 1:
        time.sleep(FIRST_TICK + 1.0)
    x = torch.ones(1, 3)
    assert torch.equal(model(x), plain(x))
