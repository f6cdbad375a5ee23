"""Clipping by norm scales gradients on the host thread, and nobody can tell but by the time that it takes."""

from __future__ import annotations

import threading

import pytest
import torch

from tests.offload.models import Training, flats, inputs, loss_of, same, units
from tests.support.inside import runtime_of
from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from torch_shard.offload.host_thread import Later
from torch_shard.unit.gradient_buffer import GradientBuffer


def clipped(rank, offload, accumulate=1):
    """Two steps, and the clipped gradients of a third one."""
    training = Training(rank, offload)
    for number in range(2):
        training.step(number, clip=0.1)
    for number in range(accumulate):
        loss_of(training.model, inputs(rank, 90 + number)).backward()
    training.engine.clip_grad_norm_(0.1)
    return training


def scalings(training):
    """What the host has to do to gradients that were clipped, by flat buffer."""
    found = []
    for flat in flats(training):
        (one,) = [work for work in flat.gradients.host.pending_writes.works if isinstance(work, Later)]
        found.append(one)
    return found


@pytest.mark.parametrize("accumulate", [1, *exhaustive(4)])
@ranks(2)
def test_step_does_not_wait_for_the_scaling(rank, monkeypatch, accumulate):
    plain, offloaded = Training(rank, None), Training(rank, "cpu")
    for training in (plain, offloaded):
        for number in range(2):
            training.step(number)
        for number in range(accumulate):
            loss_of(training.model, inputs(rank, 90 + number)).backward()
    thread, scale, go = runtime_of(offloaded.engine).host.thread, GradientBuffer.scale, threading.Event()

    def held_up(gradients, *args):
        thread.do(go.wait)
        scale(gradients, *args)

    plain.engine.clip_grad_norm_(0.1)
    monkeypatch.setattr(GradientBuffer, "scale", held_up)
    offloaded.engine.clip_grad_norm_(0.1)
    alarm = threading.Timer(10, go.set)
    alarm.start()
    for training in (plain, offloaded):
        training.optimizer.step()
        training.optimizer.zero_grad()
    assert not go.is_set()
    alarm.cancel()
    go.set()
    same(plain.state(), offloaded.state())


@ranks(2)
def test_a_unit_does_not_wait_for_the_scaling_of_the_others(rank):
    training = clipped(rank, "cpu")
    go, last = threading.Event(), scalings(training)[-1]
    scale = last._do
    last._do = lambda: (go.wait(10), scale())
    training.optimizer.step()
    first = flats(training)[0]
    assert not go.is_set() and first.params[0].to_local().isfinite().all()
    assert runtime_of(training.engine).reductions.used[0] is units(training)[0]
    assert flats(training)[-1].host.pending_writes and not go.is_set()
    go.set()
    training.state()


@pytest.mark.parametrize("accumulate", [1, 2])
@ranks(2)
def test_unscaled_gradients_are_clipped_as_without(rank, accumulate):
    """The norm that was taken while they moved is that of the scaled ones."""
    found = []
    for offload in (None, "cpu"):
        training, norms = Training(rank, offload, "SGD"), []
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2)
        for step in range(4):
            for micro in range(accumulate):
                loss = loss_of(training.model, inputs(rank, 10 * step + micro)) / accumulate
                if step == 2 and rank == 1:
                    loss = loss * float("inf")  # all ranks skip this step
                scaler.scale(loss).backward()
            scaler.unscale_(training.optimizer)
            norms.append(training.engine.clip_grad_norm_(0.5))
            scaler.step(training.optimizer)
            scaler.update()
            training.optimizer.zero_grad()
        found.append((norms, scaler.get_scale(), training.state()))
    (norms, scale, state), (others, other_scale, other_state) = found
    torch.testing.assert_close(torch.stack(others), torch.stack(norms), equal_nan=True, rtol=1e-6, atol=0.0)
    assert norms[0] > 0.5 and not norms[2].isfinite()
    assert scale == other_scale == 64.0 * 2 / 2
    same(state[0], other_state[0])
