"""Two communicators whose collectives the ranks issue in different orders: a device may stop there, and the simulation does."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist

from tests.simulated import process_group
from tests.simulated.modes import ACCELERATOR
from tests.simulated.simulation import group, simulated
from tests.support.ranks import ranks


@ranks(2)
def test_collectives_of_two_communicators_in_different_orders_are_a_deadlock(rank, monkeypatch):
    monkeypatch.setattr(process_group, "_LIMIT", 2.0)
    one, other = group(), group()
    with simulated("early"):
        x = torch.ones(4, device=ACCELERATOR)
        for each in (one, other):
            dist.all_reduce(x, group=each)
        with pytest.raises(AssertionError, match="the partners did not come"):
            for each in (one, other) if rank == 0 else (other, one):
                dist.all_reduce(x, group=each)
        dist.barrier()  # of the hosts: neither rank leaves while the other waits
