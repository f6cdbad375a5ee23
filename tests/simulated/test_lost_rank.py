"""A backend that can't reach another rank says so in the call that begins a collective, as NCCL does over a network."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torch_shard
from tests.simulated.modes import ACCELERATOR
from tests.simulated.process_group import SimulatedGroup
from tests.simulated.programs import ROWS, WIDTH, Model
from tests.simulated.simulation import group, simulated
from tests.support.ranks import ranks
from torch_shard.errors import DivergenceError, MissingRankError

WHAT = {"all-gather": "the all-gather of unit", "reduce-scatter": "the gradient reduction of unit"}
"""By the collective that fails: what the error calls it."""


def failing(collective: str, text: str) -> Any:
    """Return a context in which NCCL's call that begins `collective` raises."""
    run = SimulatedGroup._run

    def fails(self: SimulatedGroup, name: str, *args: Any) -> Any:
        if collective in name:
            raise dist.DistBackendError(text)
        return run(self, name, *args)

    return mock.patch.object(SimulatedGroup, "_run", fails)


def step(model: nn.Module) -> None:
    model(torch.ones(ROWS, WIDTH).to(ACCELERATOR)).square().mean().backward()


@pytest.mark.parametrize("collective", WHAT)
@ranks(2)
def test_the_error_names_the_rank_and_the_operation_and_the_engine_does_not_go_on(rank, collective):
    with simulated("early"):
        with ACCELERATOR:
            model = Model()
        torch_shard.shard(model, mesh=group())
        said = (
            rf"rank {rank}: {WHAT[collective]} '.*' failed at .*: another rank .*\(NCCL error: remote process exited\)$"
        )
        text = "NCCL error: remote process exited\nand where its threads were"
        with failing(collective, text), pytest.raises(MissingRankError, match=said) as raised:
            step(model)
        assert isinstance(raised.value.__cause__, dist.DistBackendError)
        with pytest.raises(DivergenceError, match="restart from a checkpoint"):
            step(model)


@ranks(2)
def test_other_errors_of_nccl_come_through(rank):
    with simulated("early"):
        with ACCELERATOR:
            model = Model()
        torch_shard.shard(model, mesh=group())
        with (
            failing("all-gather", "NCCL error: unhandled cuda error"),
            pytest.raises(dist.DistBackendError, match="cuda"),
        ):
            step(model)
