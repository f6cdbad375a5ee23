"""A whole training with stochastic rounding is nearer to fp32 masters than one without."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torch_shard
from tests.compat.harness import batch
from tests.precision.rounding_harness import (
    BF16,
    FP32,
    ROUND,
    O,
)
from tests.support.ranks import ranks
from torch_shard import Precision


def curve(rank: int, precision: Any, steps: int = 200) -> torch.Tensor:
    """Losses of a regression whose updates are soon below the resolution of bf16."""
    torch.manual_seed(0)
    teacher = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).to(BF16)
    torch_shard.shard(model, unit_bytes=2000, precision=precision)
    optimizer = O.AdamW(model.parameters(), lr=3e-4, weight_decay=0.0)
    found = []
    for step in range(steps):
        x = batch(rank, step, 64, 16).float()
        loss = nn.functional.mse_loss(model(x.to(BF16)).float(), teacher(x).detach())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        found.append(mean)
    return torch.stack(found)


@pytest.mark.exhaustive
@ranks(2, timeout=120)
def test_a_training_is_nearer_to_one_with_fp32_masters_than_without_rounding(rank):
    masters = curve(rank, Precision(master_dtype=FP32))
    rounding, nearest = curve(rank, ROUND), curve(rank, None)
    assert masters[-50:].mean() < 0.8 * masters[:10].mean()  # it learns
    ours, theirs = ((run - masters)[-100:].abs().mean() for run in (rounding, nearest))
    assert ours < 0.5 * theirs, (ours, theirs)
