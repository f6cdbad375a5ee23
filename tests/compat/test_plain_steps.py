"""Plain steps, as any training script does them."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from tests.compat.harness import MLP, Pair, batch, loss_of, plain_backward, same, train_both
from tests.ranks import ranks


@ranks(1, 2, 3, 4)
@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
def test_a_plain_step_trains_like_the_plain_model(rank, world_size, strategy):
    train_both(MLP, rank, world_size, strategy=strategy)
