"""Units are reduced while backward still computes others."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import torch_shard
from tests.support.followed import followed
from tests.support.ranks import ranks


class Layers(nn.Module):
    def __init__(self, checkpointing: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(4)])
        self.head = nn.Linear(16, 16)
        self.checkpointing = checkpointing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            if self.checkpointing == "none":
                x = layer(x).tanh()
            else:
                x = checkpoint(layer, x, use_reentrant=self.checkpointing == "reentrant").tanh()
        output: torch.Tensor = self.head(x)
        return output


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "shard_optim"])
@pytest.mark.parametrize("checkpointing", ["none", "reentrant", "not reentrant"])
@ranks(2)
def test_a_layer_is_reduced_when_its_backward_has_ended(
    rank: int, monkeypatch: pytest.MonkeyPatch, checkpointing: str, strategy: str
) -> None:
    torch.manual_seed(0)
    model = Layers(checkpointing)
    torch_shard.shard(model, strategy=strategy, units=[nn.Linear])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(4, 16, requires_grad=True)

    def loss() -> torch.Tensor:
        optimizer.zero_grad()
        with torch.no_grad():
            model(x)
        return model(x).square().mean()

    for _ in range(2):
        loss().backward()
        optimizer.step()
    last = loss()
    began: list[int] = []
    with followed(monkeypatch) as found:
        for layer in model.layers:
            layer.weight.register_hook(lambda grad: began.append(len(found)))
        last.backward()
    reduced = [at for at, (kind, _) in enumerate(found) if kind == "reduce"]
    assert [found[at][1] for at in reduced] == ["head", "layers.3", "layers.2", "layers.1", "layers.0"]
    # When the first layer's gradient comes, those of all others are on their way.
    assert began[-1] > reduced[3]
