"""Whoever shares memory with what the host works on finds it as without offload."""

from __future__ import annotations

import threading

import pytest
import torch

import torch_shard
from tests.offload.models import Training, inputs, loss_of, same
from tests.support.ranks import ranks
from torch_shard.offload import Offload


def prepared(rank, offload, optimizer="SGD"):
    training = Training(rank, offload, optimizer)
    for number in range(2):
        training.step(number, clip=0.1)
    loss_of(training.model, inputs(rank, 9)).backward()
    return training


def delayed(training):
    host = training.engine._runtime.host
    if host is not None:
        go = threading.Event()
        host.thread.do(go.wait)
        threading.Timer(0.15, go.set).start()


SHARED = {"detach": lambda p: p.detach(), "data": lambda p: p.data, "local": lambda p: p.to_local()}


@pytest.mark.parametrize("share", SHARED)
@ranks(2)
def test_what_shares_memory_sees_the_step(rank, share):
    found = []
    for offload in (None, "cpu"):
        training = prepared(rank, offload)
        weight = training.model.blocks[2][1].weight
        shared = [SHARED[share](t) for t in (weight, training.optimizer.state[weight]["momentum_buffer"], weight.grad)]
        delayed(training)
        training.engine.clip_grad_norm_(0.01)
        training.optimizer.step()
        found.append([t.clone() if share == "local" else t.to_local().clone() for t in shared])
    same(*found)


@ranks(2)
def test_edits_that_no_version_shows_are_computed_with(rank):
    found = []
    for offload in (None, Offload(params=False)):
        training = prepared(rank, offload)
        with torch.no_grad():
            for p in training.model.parameters():
                p.to_local().detach().numpy()[:] *= 0.5
                p.grad.to_local().detach().numpy()[:] *= 0.5
            found.append([training.engine.clip_grad_norm_(0.1), loss_of(training.model, inputs(0, 3))])
            with training.engine.gathered(write=True, ranks=[0]):
                for p in training.model.parameters() if rank == 0 else ():
                    p.mul_(0.5)
            found[-1].append(loss_of(training.model, inputs(0, 3)))
    same(*found)


@ranks(2)
def test_norms_of_unscaled_gradients_are_theirs(rank):
    found = []
    for offload in (None, "cpu"):
        training = prepared(rank, offload)
        training.optimizer.zero_grad()
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        scaler.scale(loss_of(training.model, inputs(rank, 9))).backward()
        scaler.unscale_(training.optimizer)
        found.append(training.engine.clip_grad_norm_(0.1))
    same(*found)


@ranks(2)
def test_a_refused_step_has_changed_nothing(rank):
    training = prepared(rank, "cpu")
    before = training.engine.state_dict(form="full")
    last = list(training.model.parameters())[-1]
    training.optimizer.state[last]["momentum_buffer"] = torch.zeros(3)
    with pytest.raises(torch_shard.ShardError, match="momentum_buffer"):
        training.optimizer.step()
    same(before, training.engine.state_dict(form="full"))


@ranks(1)
def test_a_forward_does_not_wait_for_gradients(rank):
    training = prepared(rank, "cpu")
    go = threading.Event()
    training.engine._runtime.host.thread.do(go.wait)
    loss_of(training.model, inputs(rank, 1)).backward()
    loss_of(training.model, inputs(rank, 2))  # would wait for ever
    go.set()
