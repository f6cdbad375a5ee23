"""Clipping the parameters of several models by one norm."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import torch_shard
from tests.support.ranks import ranks
from torch_shard.errors import ConfigError
from torch_shard.frontend.clipping import clip_norm


def models() -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(5, 3).double(), nn.Linear(4, 2).double()]


def backward(plain: list[nn.Module]) -> None:
    for model in plain:
        model(torch.ones(2, model.in_features, dtype=torch.float64)).pow(2).sum().backward()


@ranks(2)
def test_several_sharded_models_are_clipped_by_their_common_norm(rank: int) -> None:
    plain = models()
    sharded = copy.deepcopy(plain)
    engines = [torch_shard.shard(model) for model in sharded]
    backward(plain)
    backward(sharded)
    params = [p for model in sharded for p in model.parameters()]
    norm = clip_norm(engines, params, 0.1, 2.0)
    expected = torch.nn.utils.clip_grad_norm_([p for model in plain for p in model.parameters()], 0.1)
    torch.testing.assert_close(torch.as_tensor(norm), expected)
    for ours, theirs in zip(params, [p for model in plain for p in model.parameters()], strict=True):
        torch.testing.assert_close(ours.grad.full_tensor(), theirs.grad)


@pytest.mark.parametrize("left_out", ["by ignore", "by nobody"])
@ranks(2)
def test_with_parameters_that_differ_between_ranks_it_is_an_error_before_anything_changes(
    rank: int, left_out: str
) -> None:
    first, second, other = *models(), nn.Linear(3, 3).double()
    engines = [torch_shard.shard(first), torch_shard.shard(second, ignore=["bias"] if left_out == "by ignore" else [])]
    found = [first, second, *([other] if left_out == "by nobody" else [])]
    backward(found if rank == 0 else [first, second])  # rank 1 has no gradient of the other model
    before = [None if p.grad is None else p.grad.clone() for model in found for p in model.parameters()]
    params = [p for model in found for p in model.parameters()]
    with pytest.raises(ConfigError, match="with others that are not sharded"):
        clip_norm(engines, params, 0.1, 2.0)
    for p, grad in zip(params, before, strict=True):
        assert p.grad is grad is None or torch.equal(p.grad, grad)
