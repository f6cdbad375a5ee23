"""A profiler that records a step must not make it hang."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks
from torch.profiler import ProfilerActivity, profile

import torch_shard
from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from torch_shard.utils.autograd_private import outside_saved_tensors_hooks
from torch_shard.utils.autograd_private import saved_tensors_hooks as saved_tensors_hooks_in_force


def same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


@pytest.mark.parametrize("strategy", ["full_shard", *exhaustive("no_shard")])
@ranks(2, timeout=60)
def test_steps_within_hooks_of_saved_tensors_are_profiled(strategy):
    model = nn.Sequential(*[nn.Linear(32, 32) for _ in range(8)])
    torch_shard.shard(model, strategy=strategy, units=[nn.Linear])
    x = torch.ones(2, 32)
    for _ in range(30):  # without the precaution in `outside_saved_tensors_hooks` one of them hangs
        with profile(activities=[ProfilerActivity.CPU]) as profiled, saved_tensors_hooks(same, same):
            model(x).sum().backward()
            model.zero_grad()
    names = {event.name for event in profiled.events()}
    assert any(name.startswith("gloo:") for name in names), names


def test_hooks_are_in_force_again_behind_a_collective():
    first, second = (lambda t: t, same), (lambda t: t, same)
    with saved_tensors_hooks(*first), saved_tensors_hooks(*second):
        outside_saved_tensors_hooks(torch.zeros, 1)
        assert saved_tensors_hooks_in_force(True) == second
        with pytest.raises(ValueError):
            outside_saved_tensors_hooks(int, "x")
        assert saved_tensors_hooks_in_force(True) == second
    assert saved_tensors_hooks_in_force(True) is None
