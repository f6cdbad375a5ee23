"""Clipping by norm scales gradients on the host thread, and nobody can tell but by the time that it takes."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.distributed as dist

from tests.offload.models import Training, flats, inputs, loss_of, same, units
from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from torch_shard import errors
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
    thread, scale, go = offloaded.engine._runtime.host.thread, GradientBuffer.scale, threading.Event()

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
    assert training.engine._runtime.reductions.used[0] is units(training)[0]
    assert flats(training)[-1].host.pending_writes and not go.is_set()
    go.set()
    training.state()


READERS = {
    "slice": lambda p: p.grad.to_local().clone(),
    "alias": lambda p: p.grad.detach().to_local().clone(),
    "norm": lambda p: p.grad.norm(),
    "whole": lambda p: p.grad.full_tensor(),
}


@pytest.mark.parametrize("reader", ["slice", "norm", *exhaustive("alias", "whole")])
@ranks(2)
def test_who_reads_a_gradient_before_the_step_reads_it_clipped(rank, reader):
    plain, offloaded = clipped(rank, None), clipped(rank, "cpu")
    assert not any(work.has_ended() for work in scalings(offloaded))
    found = [
        [READERS[reader](p) for p in training.model.parameters() if p.grad is not None]
        for training in (plain, offloaded)
    ]
    same(*found)


@ranks(2)
def test_an_alias_from_before_clipping_is_clipped(rank):
    found = []
    for offload in (None, "cpu"):
        training = Training(rank, offload)
        loss_of(training.model, inputs(rank, 1)).backward()
        aliases = [p.grad.detach() for p in training.model.parameters()]
        training.engine.clip_grad_norm_(0.1)
        found.append([alias.to_local().clone() for alias in aliases])
    same(*found)


def edited(training):
    for p in training.model.parameters():
        p.grad.mul_(0.5)


def accumulated(training):
    loss_of(training.model, inputs(training.rank, 5)).backward()


def cleared(training):
    training.optimizer.zero_grad()
    loss_of(training.model, inputs(training.rank, 5)).backward()


def zeroed(training):
    training.optimizer.zero_grad(set_to_none=False)
    loss_of(training.model, inputs(training.rank, 5)).backward()


BETWEEN = {
    "edited": edited,
    "accumulated": accumulated,
    "clipped again": lambda t: t.engine.clip_grad_norm_(0.01),
    "clipped by value": lambda t: t.engine.clip_grad_value_(1e-3),
    "cleared": cleared,
    "zeroed": zeroed,
}


@pytest.mark.parametrize("between", ["edited", "accumulated", *exhaustive(*list(BETWEEN)[2:])])
@ranks(2)
def test_what_is_done_between_clipping_and_the_step_is_done_behind_the_scaling(rank, between):
    both = clipped(rank, None, accumulate=2), clipped(rank, "cpu", accumulate=2)
    for training in both:
        BETWEEN[between](training)
        training.optimizer.step()
        training.optimizer.zero_grad()
        training.step(7, clip=0.1)
    same(both[0].state(), both[1].state())


@ranks(1)
def test_steps_that_are_left_out_leave_nothing_behind(rank):
    training = clipped(rank, "cpu")
    for number in range(10):
        training.optimizer.zero_grad()
        loss_of(training.model, inputs(rank, number)).backward()
        training.engine.clip_grad_norm_(0.1)
    assert max(len(flat.gradients.host.pending_writes.works) for flat in flats(training)) < 6


@pytest.mark.exhaustive
@ranks(2, fresh=True)
def test_a_scaling_that_fails_is_raised_where_it_is_missed(rank):
    training = clipped(rank, "cpu")
    if rank == 0:

        def fail():
            raise MemoryError("no room")

        scalings(training)[0]._do = fail
    training.optimizer.step()
    with pytest.raises(errors.ShardError, match="no room"):
        training.model(inputs(rank, 1))
        loss_of(training.model, inputs(rank, 1)).backward()
    dist.barrier()


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
