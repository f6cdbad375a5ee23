"""Checkpoints inside a layer's forward, whose recomputation runs without the hooks of the layer, as in transformers."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import torch_shard
from tests.compat.harness import train_both
from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from torch_shard.runtime.on_demand import OnDemand

LAYERS, WIDTH = 3, 6


class Layer(nn.Module):
    """Checkpoints its own forward, in one region or in two, and computes in the dtypes that its weights have."""

    def __init__(self, reentrant: bool = False, regions: int = 1) -> None:
        super().__init__()
        self.reentrant, self.regions = reentrant, regions
        self.scale = nn.Parameter(torch.full((WIDTH,), 1.25))
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def mix(self, x: torch.Tensor) -> torch.Tensor:
        # As T5's norm does.
        return torch.tanh(x.float() if self.scale.dtype == torch.float32 else x.to(self.scale.dtype)) * self.scale

    def feed(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.tanh(nn.functional.linear(x, self.up.weight, self.up.bias))  # not through the module
        return x + self.down(y.to(self.down.weight.dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = (self.mix, self.feed) if self.regions == 2 else (lambda x: self.feed(self.mix(x)),)
        for part in parts:
            x = checkpoint(part, x, use_reentrant=self.reentrant)
        return x


class Stack(nn.Module):
    def __init__(self, reentrant: bool = False, regions: int = 1) -> None:
        super().__init__()
        self.first = nn.Linear(5, WIDTH)
        self.layers = nn.Sequential(*(Layer(reentrant, regions) for _ in range(LAYERS)))
        self.last = nn.Linear(WIDTH, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.layers(self.first(x)))


UNITS = [*(f"layers.{number}" for number in range(LAYERS)), "first", "last"]


@ranks(2, exhaustive=(3,))
@pytest.mark.parametrize("regions", [*exhaustive(1), 2])
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "nonreentrant"])
@pytest.mark.parametrize("strategy", ["full_shard", *exhaustive("shard_grad_op", "shard_optim", "no_shard")])
def test_a_layer_that_checkpoints_itself_trains_like_plain(rank, world_size, strategy, reentrant, regions):
    train_both(lambda: Stack(reentrant, regions), rank, world_size, strategy=strategy, units=UNITS)


@ranks(2)
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "nonreentrant"])
def test_a_weight_shows_the_dtype_of_the_computation_as_in_the_forward(rank, reentrant):
    def gradients(strategy: str, regions: int) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = Stack(reentrant, regions)
        if not regions:
            for layer in model.layers:
                layer.forward = lambda x, layer=layer: layer.feed(layer.mix(x))
        torch_shard.shard(model, strategy=strategy, units=UNITS, precision=torch_shard.Precision(torch.bfloat16))
        model(torch.linspace(-1, 1, 10).view(2, 5) * (rank + 1)).float().pow(2).sum().backward()
        return [p.grad.full_tensor() for p in model.parameters()]

    for strategy in ("full_shard", "no_shard"):
        torch.testing.assert_close(gradients(strategy, 1), gradients(strategy, 0), rtol=0, atol=0)


@ranks(2)
@pytest.mark.parametrize("strategy", ["full_shard", *exhaustive("no_shard")])
@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "nonreentrant"])
def test_only_the_first_operation_of_a_unit_asks_for_its_parameters(rank, strategy, reentrant, monkeypatch):
    model = Stack(reentrant)
    torch_shard.shard(model, strategy=strategy, units=UNITS)
    layer = model.layers[1]
    sharded = dict(layer.named_parameters())
    asked = []
    begin = OnDemand.begin

    def counted(self, unit, *args):
        asked.append(unit.name)
        return begin(self, unit, *args)

    loss = model(torch.ones(2, 5)).sum()
    monkeypatch.setattr(OnDemand, "begin", counted)
    loss.backward()
    assert sorted(asked) == sorted(f"layers.{number}" for number in range(LAYERS))
    assert all(p is sharded[name] for name, p in layer.named_parameters())  # they are back


@ranks(2)
def test_a_backward_that_fails_in_a_recomputation_leaves_the_sharded_parameters_in_the_modules(rank):
    model = Stack()
    torch_shard.shard(model, units=UNITS)
    sharded = dict(model.named_parameters())
    layer = model.layers[1]
    mix = layer.mix
    loss = model(torch.ones(2, 5)).sum()

    def fails(x: torch.Tensor) -> torch.Tensor:
        mix(x)
        raise ValueError("on purpose")

    layer.mix = fails
    with pytest.raises(ValueError, match="on purpose"):
        loss.backward()
    assert all(p is sharded[name] for name, p in model.named_parameters())
    layer.mix = mix
    model(torch.ones(2, 5)).sum().backward()
    assert all(p.grad is not None for p in model.parameters())
