"""What metrics keep outside parameters and buffers is moved to the device, without processes."""

from __future__ import annotations

import torch
from torch import nn
from torchmetrics import Metric

from lightning_shard.strategy.metric_states import move_states


class Distance(Metric):
    """Computes with a network, as FrechetInceptionDistance does."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        self.register_buffer("weights", torch.ones(2))
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")
        self.add_state("seen", [], dist_reduce_fx="cat")

    def update(self, x: torch.Tensor) -> None:
        self.total += self.net(x).sum()
        self.seen.append(x)

    def compute(self) -> torch.Tensor:
        return self.total


def test_states_of_a_metric_with_a_network_are_moved_and_nothing_else():
    model = nn.Sequential(Distance(), nn.LSTM(2, 2))
    metric = model[0]
    metric.update(torch.ones(3, 2))
    before = [*model.modules(), *model.parameters(), *model.buffers()]
    move_states(model, torch.device("meta"))
    assert metric.total.is_meta and metric.seen[0].is_meta and metric.device.type == "meta"
    after = [*model.modules(), *model.parameters(), *model.buffers()]
    assert list(map(id, after)) == list(map(id, before))
    assert {tensor.device.type for tensor in (*model.parameters(), *model.buffers())} == {"cpu"}
