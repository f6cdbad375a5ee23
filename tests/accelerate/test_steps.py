"""Training with the Accelerator gives DistributedDataParallel's numbers at every step."""

from __future__ import annotations

import pytest

from accelerate_shard import ShardPlugin
from tests.accelerate.helpers import OURS, STOCK, assert_same, train
from tests.ranks import ranks


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
@ranks(2)
def test_losses_norms_and_weights_are_those_of_ddp(strategy):
    assert_same(train(OURS, shard_plugin=ShardPlugin(strategy=strategy)), train(STOCK))
