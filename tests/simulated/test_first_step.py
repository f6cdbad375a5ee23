"""On a device the first step may take some ranks long."""

from __future__ import annotations

import time

import pytest
import torch

import torch_shard
from tests.simulated.modes import ACCELERATOR
from tests.simulated.programs import ROWS, WIDTH, Model
from tests.simulated.simulation import group, simulated
from tests.support.ranks import ranks
from torch_shard.errors import MissingRankError


@ranks(2)
def test_ranks_wait_for_each_other_in_the_first_step_and_then_no_longer_than_the_timeout(rank):
    over = group()
    with simulated("early"):
        with ACCELERATOR:
            model = Model()
        engine = torch_shard.shard(model, timeout=2.0, mesh=over)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

        def step() -> None:
            model(torch.ones(ROWS, WIDTH).to(ACCELERATOR)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        time.sleep(5.0 * rank)
        step()
        if rank:
            time.sleep(5.0)
        else:
            with pytest.raises(MissingRankError, match="waited 2 s"), engine.gathered(write=True):
                pass
