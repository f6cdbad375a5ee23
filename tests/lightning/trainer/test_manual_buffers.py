"""Running statistics under manual optimization are each rank's own, in training and evaluation, as under DDP."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.lightning.support import NAMESPACES, loader, trainer
from tests.support.marks import exhaustive
from tests.support.ranks import ranks


class Normed(NAMESPACES["lightning"].LightningModule):
    def __init__(self, manual: bool) -> None:
        super().__init__()
        self.automatic_optimization = not manual
        torch.manual_seed(8)
        self.net = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))
        self.seen: list[float] = []

    def forward(self, x: Any) -> Any:
        return self.net(x)

    def loss(self, batch: Any) -> torch.Tensor:
        return (self(batch[0]) - batch[1]).square().mean()

    def training_step(self, batch: Any, index: int) -> Any:
        if self.automatic_optimization:
            return self.loss(batch)
        for _ in range(2):  # two forwards in one step
            self.optimizers().zero_grad()
            self.manual_backward(self.loss(batch))
            self.optimizers().step()
        return None

    def validation_step(self, batch: Any, index: int) -> None:
        self.seen.append(float(self.loss(batch)))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


@pytest.mark.parametrize("sanity", [0, *exhaustive(1)])
@pytest.mark.parametrize("manual", [True, *exhaustive(False)])
@ranks(2)
def test_each_rank_validates_with_the_numbers_and_keeps_the_buffers_of_ddp(world_size, manual, sanity):
    modules = {}
    for strategy in ("ddp", "shard"):
        modules[strategy] = Normed(manual)
        t = trainer("lightning", world_size, strategy, max_epochs=2, num_sanity_val_steps=sanity)
        t.fit(modules[strategy], loader(world_size), loader(world_size, 2))
    expected, module = modules["ddp"], modules["shard"]
    assert module.seen == pytest.approx(expected.seen, rel=1e-4)
    torch.testing.assert_close(dict(module.net[1].named_buffers()), dict(expected.net[1].named_buffers()))
