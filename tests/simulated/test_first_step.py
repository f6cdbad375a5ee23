"""On a device the first step may take some ranks long."""

from __future__ import annotations

import time
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import torch_shard
from tests.simulated.modes import ACCELERATOR
from tests.simulated.process_group import BACKEND, SimulatedGroup
from tests.simulated.programs import ROWS, WIDTH, Model
from tests.simulated.simulation import group, simulated
from tests.support.inside import runtime_of
from tests.support.ranks import ranks
from torch_shard.errors import MissingRankError


@ranks(2)
def test_communicators_come_to_life_in_shard_all_in_one_order(rank):
    """NCCL makes them in the first collective of each group, and waits there for the other ranks without a limit."""
    made, begun = [], []
    init, run = SimulatedGroup.__init__, SimulatedGroup._run

    def making(self: SimulatedGroup, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        made.append(self)

    def running(self: SimulatedGroup, *args: Any) -> Any:
        begun.append(made.index(self))
        return run(self, *args)

    over = group()
    with simulated("early"):
        with ACCELERATOR:
            model = Model()
        with mock.patch.object(SimulatedGroup, "__init__", making), mock.patch.object(SimulatedGroup, "_run", running):
            engine = torch_shard.shard(model, mesh=over)
        channels = runtime_of(engine).collectives.watchdog.channels
        # Gathers and reductions don't make hosts connect to each other, too.
        assert {dist.get_backend(channels[name].group) for name in ("all-gather", "reduce")} == {BACKEND}
        orders: list[Any] = [None, None]
        dist.all_gather_object(orders, list(dict.fromkeys(begun)))
    assert len(made) >= 3 and sorted(orders[0]) == list(range(len(made))) and orders[0] == orders[1]


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
