"""Settings of the environment under which a device would stop, or be slow."""

from __future__ import annotations

import pytest

import torch_shard
from tests.simulated.modes import ACCELERATOR
from tests.simulated.programs import Model
from tests.simulated.simulation import group, simulated
from tests.support.inside import runtime_of
from tests.support.ranks import ranks


def warnings_of_set_up() -> tuple[list[str], bool]:
    """Return what set-up logs, and whether gathers and reductions share a communicator."""
    lines: list[str] = []
    listen = lambda record: lines.append(record.getMessage()) or True  # noqa: E731
    torch_shard.log.logger.addFilter(listen)
    try:
        over = group()
        with simulated():
            with ACCELERATOR:
                model = Model()
            engine = torch_shard.shard(model, mesh=over)
            shared = runtime_of(engine).collectives.in_one_order
    finally:
        torch_shard.log.logger.removeFilter(listen)
    return lines, shared


@ranks(2)
def test_streams_that_share_a_queue_get_one_communicator(rank, monkeypatch: pytest.MonkeyPatch):
    assert warnings_of_set_up() == ([], False)
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    lines, shared = warnings_of_set_up()
    assert shared
    assert [line for line in lines if "CUDA_DEVICE_MAX_CONNECTIONS" in line] if rank == 0 else True


@ranks(2)
def test_a_host_that_waits_for_each_collective_is_warned_of(rank, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("TORCH_NCCL_BLOCKING_WAIT", "1")
    lines, shared = warnings_of_set_up()
    assert not shared
    assert [line for line in lines if "TORCH_NCCL_BLOCKING_WAIT" in line] if rank == 0 else True
