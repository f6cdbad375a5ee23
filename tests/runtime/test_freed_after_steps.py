"""What forwards without a backward hold is given back when the parameters change."""

from __future__ import annotations

import pytest
import torch

import torch_shard
from tests.compat.harness import MLP, batch, loss_of
from tests.support.marks import exhaustive
from tests.support.ranks import ranks


@pytest.mark.parametrize("strategy", ["shard_grad_op", "shard_optim", *exhaustive("full_shard")])
@ranks(2)
def test_a_step_frees_the_units_of_a_forward_whose_backward_never_came(strategy, rank, world_size):
    model = MLP()
    engine = torch_shard.shard(model, strategy=strategy, unit_bytes=300)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    loss_of(model(batch(rank, 0).float())).backward()
    unused = loss_of(model(batch(rank, 1).float()))
    assert engine.memory_summary()["gathered"] > 0
    optimizer.step()
    assert engine.memory_summary()["gathered"] == 0
    assert unused.requires_grad  # its graph was alive all the time
