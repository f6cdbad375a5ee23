"""Inputs that a program gives on the host belong to the program again when the forward has returned."""

from __future__ import annotations

import torch

from tests.simulated.modes import ACCELERATOR
from tests.simulated.programs import ROWS, WIDTH
from tests.simulated.simulation import simulated
from tests.support.ranks import ranks
from torch_shard.offload import pinned
from torch_shard.runtime.mixed_precision_hooks import moved


@ranks(1)
def test_a_page_locked_batch_may_be_filled_again(rank: int) -> None:
    with simulated("late") as world:
        batch = pinned.allocate(ROWS * WIDTH, torch.float32, pin=True, device=ACCELERATOR).fill_(0.5)
        (given,), _ = moved(((batch,), {}), ACCELERATOR)
        batch.fill_(1.5)  # by the host, as a loader does that uses its page-locked memory again
        assert given.sum().item() == 0.5 * ROWS * WIDTH
    assert not world.memory.races
