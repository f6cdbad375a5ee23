"""A plain model that is traced for the settings of an engine computes in the dtypes in which it does when it is sharded."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import nn

import torch_shard
from torch_shard import Precision, ShardConfig
from torch_shard.plan.planner import make_plan
from torch_shard.plan.trace_for import trace_for

NOTED: list[torch.dtype] = []  # a trace runs a copy of the model, which notes them here, too


class Told(nn.Module):
    """A module that notes the dtypes with which it is called, and which it returns."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        NOTED.append(x.dtype)
        out = self.inner(x)
        NOTED.append(out.dtype)
        return out


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)
        self.kept = nn.Sequential(Told(nn.LayerNorm(8)), Told(nn.Linear(8, 8)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        NOTED.append(x.dtype)
        out = self.kept(self.first(x))
        NOTED.append(out.dtype)
        return self.last(out)


def dtypes_of_both(model: nn.Module, step: Callable[[nn.Module], None], config: ShardConfig) -> list[torch.dtype]:
    """Return the dtypes that a traced step notes, and compare them with those of the same step of the sharded model."""
    NOTED.clear()
    trace_for(model, step, make_plan(model, config, 1), config)
    traced = NOTED.copy()
    NOTED.clear()
    torch_shard.shard(model, config)
    step(model)
    assert traced == NOTED
    return traced


@pytest.mark.parametrize("cast_inputs", [True, "root"])
@pytest.mark.parametrize("keep", [(), ("kept",), (nn.LayerNorm, nn.Linear)])
def test_kept_modules_compute_as_they_are_stored(keep, cast_inputs):
    precision = Precision(torch.bfloat16, keep=keep, cast_inputs=cast_inputs, output_dtype=torch.float64)
    config = ShardConfig(precision=precision, units=("kept.*",))
    results = []

    def step(model):
        out = model(torch.randn(2, 8))
        results.append(out.dtype)
        out.sum().backward()

    traced = dtypes_of_both(Model(), step, config)
    assert results == [torch.float64] * 2
    assert (torch.float32 in traced) == bool(keep)


class WithFrozen(nn.Module):
    """A part that trains in bfloat16, and a frozen one that is stored in half precision."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = Told(nn.Linear(8, 8)).half().requires_grad_(False)
        self.trained = Told(nn.Linear(8, 8)).bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.trained(self.frozen(x.half()).float())


def test_inputs_of_a_frozen_part_that_is_not_cast_stay_as_they_are():
    config = ShardConfig(precision=Precision(master_dtype=torch.float32), units=("frozen", "trained"))

    def step(model):
        model(torch.randn(2, 8)).float().sum().backward()

    assert dtypes_of_both(WithFrozen(), step, config) == [torch.float16] * 2 + [torch.bfloat16] * 2
