"""Optimizer state, and parameters, in files below a directory."""

from __future__ import annotations

import errno
import gc
import os
import time
import unittest.mock

import pytest
import torch

import torch_shard
from tests.offload.models import Model, Training, inputs, loss_of, same
from tests.offload.residency import resident
from tests.support.inside import runtime_of
from tests.support.ranks import ranks
from torch_shard import errors
from torch_shard.offload import Offload


@ranks(2)
def test_state_lies_on_disk_without_a_name_and_goes_with_the_engine(rank, tmp_path):
    training = Training(rank, Offload(nvme=tmp_path))
    for number in range(3):
        training.step(number)
    training.engine.state_dict(form="full")  # the host has stepped
    disk = runtime_of(training.engine).host.disk
    state = sum(v.to_local().nbytes for own in training.optimizer.state.values() for v in own.values() if v.dim())
    assert disk.allocated >= state > 0
    assert os.listdir(tmp_path) == []
    training.engine.close(training.optimizer)
    training.optimizer = None
    gc.collect()
    assert disk.allocated == 0


@pytest.mark.exhaustive
@ranks(2)
def test_no_more_than_four_units_are_in_memory(rank, tmp_path):
    training = Training(rank, Offload(nvme=tmp_path), units=["blocks.*"])
    for number in range(3):
        training.step(number)
    training.engine.state_dict(form="full")
    disk = runtime_of(training.engine).host.disk
    assert sum(resident(m.address, m.nbytes) for m in disk._mappings.values()) < disk.allocated / 2


@ranks(1)
def test_state_that_was_loaded_of_parameters_that_are_frozen_goes_there_too(rank, tmp_path):
    first = Training(rank, Offload(nvme=tmp_path / "state"))
    first.step(0)
    first.engine.save(tmp_path / "checkpoint", optimizer=first.optimizer)
    found = []
    for offload in (None, Offload(nvme=tmp_path / "state")):
        training = Training(rank, offload)
        training.engine.load(tmp_path / "checkpoint", optimizer=training.optimizer)
        training.model.blocks[1][1].requires_grad_(False)
        for number in range(1, 4):
            training.step(number)
        training.model.blocks[1][1].requires_grad_(True)
        training.step(5)
        found.append(training.state())
    same(*found)
    disk, state = runtime_of(training.engine).host.disk, training.optimizer.state
    held = sum(v.to_local().nbytes for own in state.values() for v in own.values() if v.dim())
    assert disk.allocated >= held


@ranks(2)
def test_a_directory_that_one_rank_cannot_make_is_refused_by_all_before_anything_changes(rank, tmp_path, monkeypatch):
    model = Model()
    before = {name: id(p) for name, p in model.named_parameters()}
    if rank == 1:
        monkeypatch.setattr(os, "open", unittest.mock.Mock(side_effect=PermissionError(13, "Permission denied")))
    with pytest.raises(errors.ShardError, match=r"rank 1: nvme='.*' can't be used: Permission denied"):
        torch_shard.shard(model, offload=Offload(nvme=tmp_path))
    assert {name: id(p) for name, p in model.named_parameters()} == before
    assert not any(isinstance(p, torch_shard.ShardTensor) for p in model.parameters())


class Unknown(torch.optim.Optimizer):
    """Not declared to work element by element."""

    def __init__(self, params):
        super().__init__(params, {})

    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(p.grad, alpha=-0.1)


@pytest.mark.parametrize("kind", [Unknown, torch.optim.Adafactor])
@ranks(2)
def test_an_optimizer_whose_state_would_stay_in_memory_is_refused(rank, tmp_path, kind):
    training = Training(rank, Offload(nvme=tmp_path))
    optimizer = kind(training.model.parameters())
    loss_of(training.model, inputs(rank, 0)).backward()
    before = training.engine.state_dict(form="full")
    with pytest.raises(errors.ShardError, match=r"would keep its state in memory"):
        optimizer.step()
    same(before, training.engine.state_dict(form="full"))


@ranks(2)
def test_stepping_in_backward_is_refused_where_state_would_stay_in_memory(rank, tmp_path):
    class Own(torch.optim.SGD):
        def step(self, closure=None):
            for p in self.param_groups[0]["params"]:
                p.data.add_(p.grad, alpha=-0.1)

    torch_shard.optim.register(Own, kind="elementwise")
    training = Training(rank, Offload(nvme=tmp_path))
    with pytest.raises(errors.ShardError, match="would keep its state in memory"):
        training.engine.step_in_backward(Own(training.model.parameters()))


@ranks(2, fresh=True)
def test_a_disk_that_is_full_on_one_rank_stops_all(rank, tmp_path, monkeypatch):
    training = Training(rank, Offload(nvme=tmp_path))
    loss_of(training.model, inputs(rank, 0)).backward()
    if rank == 0:

        def full(*_):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(os, "posix_fallocate", full)
        with pytest.raises(errors.DiskError, match=r"rank 0: 'state blocks\..* can't be put on disk: No space left"):
            training.optimizer.step()
        monkeypatch.undo()
    else:
        training.optimizer.step()
        begin = time.monotonic()
        with pytest.raises(errors.ShardError, match="can't be put on disk"):
            loss_of(training.model, inputs(rank, 1)).backward()
        assert time.monotonic() - begin < 10
    torch.distributed.barrier()
