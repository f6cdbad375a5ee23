"""Frozen parameters: in-place edits that would be part of a graph, and addresses of memory that goes away."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import torch_shard
from tests.support.ranks import ranks
from torch_shard.errors import ShardError


class Frozen(nn.Module):
    """The second layer is frozen; `edit` is called with the module in forward."""

    def __init__(self, edit=None):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 5), nn.Linear(5, 3)
        self.second.requires_grad_(False)
        self.scale = nn.Parameter(torch.ones(()))
        self.edit = edit

    def forward(self, x):
        if self.edit is not None:
            self.edit(self)
        return self.second(self.first(x))


OUTSIDE = {
    "a tensor": lambda m: m.second.weight.mul_(torch.full((5,), 2.0, requires_grad=True)),
    "a number": lambda m: m.second.weight.add_(torch.ones((), requires_grad=True)),
    "a parameter": lambda m: m.second.weight.mul_(m.scale),
    "a copy": lambda m: m.second.bias.copy_(torch.ones(3, requires_grad=True)),
    "an index": lambda m: m.second.weight.__setitem__(0, torch.ones(5, requires_grad=True)),
}


@pytest.mark.parametrize("way", OUTSIDE)
@ranks(2)
def test_a_frozen_parameter_is_not_edited_with_what_records_gradients(way):
    model = Frozen()
    engine = torch_shard.shard(model)
    x = torch.ones(2, 4)
    with torch.no_grad():
        before = model(x)
    with pytest.raises(ShardError, match=r"second\.(weight|bias) does not require gradients"):
        OUTSIDE[way](model)
    torch.testing.assert_close(model(x).detach(), before, rtol=0, atol=0)
    model(x).sum().backward()
    assert model.first.weight.grad is not None and model.second.weight.grad is None
    engine.close()


@pytest.mark.parametrize("strategy", ["full_shard", "shard_grad_op", "no_shard"])
@ranks(2)
def test_nor_in_forward(strategy):
    model = Frozen(lambda m: m.second.weight.mul_(m.scale * 2))
    torch_shard.shard(model, strategy=strategy)
    with pytest.raises(ShardError, match=r"second\.weight does not require gradients"):
        for _ in range(2):
            model(torch.ones(2, 4)).sum().backward()
    model.edit = None
    model(torch.ones(2, 4)).sum().backward()


@ranks(2)
def test_a_frozen_parameter_may_be_edited_without_gradients():
    def edit(m):
        with torch.no_grad():
            m.second.weight.mul_(m.scale * 2)

    models = Frozen(edit), Frozen(edit)
    torch_shard.shard(models[1])
    for model in models:
        edit(model)
        model.second.bias.mul_(3)
    x = torch.ones(2, 4)
    torch.testing.assert_close(models[1](x), models[0](x), rtol=0, atol=0)
