"""One short training run for each strategy: what must work in every installation of the wheel."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torch_shard
from tests.support.ranks import ranks

pytestmark = pytest.mark.wheel


def train(model: nn.Module, batches: torch.Tensor) -> list[torch.Tensor]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for batch in batches:
        loss = (model(batch) - batch.sum(-1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return losses


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "shard_optim", "no_shard"])
@ranks(1, 2)
def test_a_sharded_model_trains_like_the_plain_one(rank, world_size, device, strategy):
    plain = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.Tanh(), nn.Linear(3, 1)).to(device)
    sharded = copy.deepcopy(plain)
    engine = torch_shard.shard(sharded, strategy=strategy)
    batches = torch.randn(4, world_size * 6, 5, device=device)
    expected = train(plain, batches)
    losses = torch.stack(train(sharded, batches.chunk(world_size, dim=1)[rank]))
    dist.all_reduce(losses)
    torch.testing.assert_close(losses / world_size, torch.stack(expected))
    with engine.gathered():
        for (name, wanted), parameter in zip(plain.named_parameters(), sharded.parameters(), strict=True):
            torch.testing.assert_close(parameter.detach(), wanted.detach(), msg=lambda text, n=name: f"{n}: {text}")
