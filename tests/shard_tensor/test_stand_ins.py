"""Objects that stand for a tensor and load it when a function of torch meets them, as loaders of large checkpoints have them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import torch_shard
from tests.support.ranks import ranks


class StandIn:
    """No tensor. Its own ``__torch_function__`` puts the tensor in its place."""

    def __init__(self, load: Callable[[], torch.Tensor]) -> None:
        self.load = load
        self.shape, self.is_complex = load().shape, load().is_complex

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*(arg.load() if isinstance(arg, StandIn) else arg for arg in args), **(kwargs or {}))


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))


@ranks(2)
def test_they_are_loaded(rank: int) -> None:
    values = model_of(1).state_dict()
    model = model_of(0)
    torch_shard.shard(model)
    model.load_state_dict({name: StandIn(lambda value=value: value) for name, value in values.items()})
    for name, p in model.named_parameters():
        assert torch.equal(p.full_tensor(), values[name])


@ranks(2)
def test_they_are_operands(rank: int) -> None:
    model = model_of(0)
    wanted = model[0].weight.detach().clone() + 2
    torch_shard.shard(model)
    with torch.no_grad():
        found = model[0].weight + StandIn(lambda: torch.tensor(2.0))
    assert torch.equal(found.full_tensor(), wanted)
