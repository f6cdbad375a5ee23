"""One rank computes by itself while the others wait in a collective of the Trainer's: an error at once, and no wait."""

from __future__ import annotations

import time

import pytest
import torch

from tests.lightning.support import loader, net_class, trainer
from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from torch_shard.errors import DivergenceError


class Samples(net_class("lightning")):
    def on_validation_epoch_end(self):
        if self.trainer.is_global_zero:
            self(torch.ones(1, 6))


class Generates(net_class("lightning")):
    def validation_step(self, batch, index):
        for _ in range(1 + 2 * self.global_rank):
            self.head(self.inner(batch[0]))
        super().validation_step(batch, index)


class Waits(net_class("lightning")):
    def on_train_epoch_end(self):
        if self.trainer.is_global_zero:
            self(torch.ones(1, 6))
        self.trainer.strategy.barrier()


@pytest.mark.parametrize("module", [Samples, *exhaustive(Generates, Waits)])
@ranks(2, fresh=True, timeout=60)
def test_it_is_an_error_on_all_ranks_at_once(world_size, module):
    started = time.monotonic()
    with pytest.raises(DivergenceError, match=r"rank [01]"):
        trainer("lightning", world_size).fit(module(), loader(world_size), loader(world_size, 2))
    assert time.monotonic() - started < 20
