"""Errors of the engine name it as a user of the Trainer does."""

from __future__ import annotations

import pytest
from torch.utils.data import DataLoader

from tests.lightning.support import Net, loader, shard_strategy, trainer
from tests.lightning.trainer.test_ranks_apart import Stream
from tests.support.ranks import ranks
from torch_shard.errors import DivergenceError, NeedsGatherError


class Looks(Net):
    def on_train_start(self):
        weight = self.inner.weight
        with pytest.raises(NeedsGatherError, match=r"`with trainer\.strategy\.engine\.gathered\(parameter\):`"):
            weight.data_ptr()
        trainer = self.trainer
        with trainer.strategy.engine.gathered(weight):
            self.seen.append(weight.data_ptr())


@ranks(2)
def test_a_parameter_that_has_to_be_gathered(world_size):
    module = Looks()
    trainer("lightning", world_size, max_steps=1).fit(module, loader(world_size))
    assert module.seen


@ranks(2)
def test_different_numbers_of_batches(rank, world_size):
    samples = list(loader(world_size, 2 + rank).dataset)
    data = DataLoader(Stream(samples), batch_size=4)
    with pytest.raises(DivergenceError, match=r"evaluate inside trainer\.strategy\.engine\.gathered\(\)"):
        trainer("lightning", world_size, shard_strategy(alone="error")).validate(Net(), data, verbose=False)
