"""Two communicators whose collectives the ranks issue in different orders: a device may stop there, and the simulation does.

So do the hosts where the collectives are the first ones, which make the communicators.
"""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.simulated import process_group
from tests.simulated.modes import ACCELERATOR
from tests.simulated.programs import Scenario
from tests.simulated.scenarios import HYBRID, SCENARIOS
from tests.simulated.simulation import group, simulated
from tests.support.ranks import ranks
from torch_shard.comm import communicators


@ranks(2)
@pytest.mark.parametrize("lazily", [False, True])
def test_collectives_of_two_communicators_in_different_orders_are_a_deadlock(rank, lazily, monkeypatch):
    monkeypatch.setattr(process_group, "_LIMIT", 2.0)
    one, other = group(), group()
    with simulated("early"):
        x = torch.ones(4, device=ACCELERATOR)
        for each in () if lazily else (one, other):
            dist.all_reduce(x, group=each)
        with pytest.raises(AssertionError, match="the partners did not come"):
            for each in (one, other) if rank == 0 else (other, one):
                dist.all_reduce(x, group=each)
        dist.barrier()  # of the hosts: neither rank leaves while the other waits


def _finds_communicators_made_in_a_step(scenario: Scenario, monkeypatch: pytest.MonkeyPatch) -> None:
    assert scenario.run().failures == []
    monkeypatch.setattr(communicators, "_begin_all", lambda *_: None)
    found = scenario.run().failures
    assert any("makes a communicator where a rank may be missing" in each for each in found), found


@ranks(2)
def test_a_communicator_made_in_a_forward_is_found(rank, monkeypatch):
    _finds_communicators_made_in_a_step(SCENARIOS["buffers"], monkeypatch)


@pytest.mark.exhaustive
@ranks(4)
def test_a_communicator_made_in_a_backward_is_found(rank, monkeypatch):
    _finds_communicators_made_in_a_step(HYBRID["hybrid_shard, fp32"], monkeypatch)
