"""Memory on the GPU: the same in every step (over NCCL exactly), and of a few units at a time however many there are."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import torch_shard
from tests.gpu.models import GPT, Block, nbytes, peak_bytes, tokens, train_step
from tests.support.ranks import ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and torch sees none here")

strategies = pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])


def peaks(rank: int, device: torch.device, steps: int, **settings: Any) -> list[int]:
    """The peak of each step of training a GPT."""
    torch.manual_seed(0)
    model = GPT(width=192, blocks=6, heads=4, length=128).to(device)
    engine = torch_shard.shard(model, units=[Block], timeout=60.0, **settings)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = tokens(rank, 0, device, size=4, length=128)
    found = []
    for _ in range(steps):
        # Whatever the last step has left running counts for that step.
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        train_step(model, optimizer, x, engine)
        torch.cuda.synchronize(device)
        found.append(peak_bytes(device))
    return found


@strategies
@ranks(1, 2, backend="nccl", timeout=300)
def test_peak_memory_over_nccl_is_the_same_in_every_step(rank, device, strategy):
    """With one rank nothing is gathered: then this is about gradient buffers."""
    first, *others = peaks(rank, device, 10, strategy=strategy)  # the first step makes the optimizer's state
    assert len(set(others)) == 1, (first, others)


@strategies
@ranks(2, 3, timeout=300)
def test_peak_memory_of_ranks_that_share_a_gpu_is_about_the_same_in_every_step(rank, device, strategy):
    """Over Gloo a reduction ends when the other rank's host is there, so which buffers meet is a matter of timing."""
    first, *others = peaks(rank, device, 10, strategy=strategy)
    assert max(others) <= 1.05 * min(others), (first, others)


BLOCKS = 24


def check_few_units_at_a_time(rank: int, world_size: int, device: torch.device) -> None:
    torch.manual_seed(0)
    model = GPT(width=256, blocks=BLOCKS, heads=4).to(device)
    unit = nbytes(model.blocks[0])
    engine = torch_shard.shard(model, units=[Block], timeout=60.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = tokens(rank, 0, device, size=1, length=4)  # activations are small beside a unit
    for _ in range(4):
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = peak_bytes(device)
        train_step(model, optimizer, x)
        torch.cuda.synchronize(device)
    above = peak_bytes(device) - before
    slices = BLOCKS * unit // world_size  # of the gradients, which stay until the optimizer's step
    # Two units whole, one gradient that is being made, two on their way with two buffers each; the rest for activations.
    assert above <= slices + 10 * unit, f"{above / unit:.1f} units, {slices / unit:.1f} of them reduced gradients"
    assert engine.memory_summary()["gathered"] == 0


@ranks(2, backend="nccl", timeout=300)
def test_a_step_over_nccl_holds_a_few_whole_units_at_a_time(rank, world_size, device):
    check_few_units_at_a_time(rank, world_size, device)


@ranks(2, timeout=300)
def test_a_step_of_ranks_that_share_a_gpu_holds_a_few_whole_units_at_a_time(rank, world_size, device):
    check_few_units_at_a_time(rank, world_size, device)
