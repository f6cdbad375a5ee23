"""A backend that can't reach another rank says so in the call that begins a collective, as NCCL does over a network."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

import torch_shard
from tests.simulated.modes import ACCELERATOR
from tests.simulated.process_group import SimulatedGroup
from tests.simulated.programs import ROWS, WIDTH, Model
from tests.simulated.simulation import group, simulated
from tests.support.ranks import ranks
from torch_shard.errors import MissingRankError

WHAT = {"all-gather": "the all-gather of unit", "reduce-scatter": "the gradient reduction of unit"}
"""By the collective that fails: what the error calls it."""


@pytest.mark.parametrize("collective", WHAT)
@ranks(2)
def test_the_error_names_the_rank_and_the_operation(rank, collective):
    run = SimulatedGroup._run

    def fails(self: SimulatedGroup, name: str, *args: Any) -> Any:
        if collective in name:
            raise dist.DistBackendError("NCCL error: remote process exited\nand where its threads were")
        return run(self, name, *args)

    with simulated("early"):
        with ACCELERATOR:
            model = Model()
        torch_shard.shard(model, mesh=group())
        x = torch.ones(ROWS, WIDTH).to(ACCELERATOR)
        said = (
            rf"rank {rank}: {WHAT[collective]} '.*' failed at .*: another rank .*\(NCCL error: remote process exited\)$"
        )
        with mock.patch.object(SimulatedGroup, "_run", fails), pytest.raises(MissingRankError, match=said) as raised:
            model(x).square().mean().backward()
        assert isinstance(raised.value.__cause__, dist.DistBackendError)
