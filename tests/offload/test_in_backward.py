"""Stepping in backward, on the host thread: backward goes on, and nobody can tell but by the time that it takes."""

from __future__ import annotations

import copy
import threading

import pytest

from tests.offload.models import HALF, OFFLOADS, Training, alike, chosen, flats, hold, inputs, loss_of, same
from tests.support.marks import one_at_a_time
from tests.support.ranks import ranks


def stepping(rank, offload, optimizer="AdamW", steps=2, **settings):
    training = Training(rank, offload, optimizer, **settings)
    training.engine.step_in_backward(training.optimizer)
    for number in range(steps):
        training.step(number)
    return training


SETTINGS = [{}, {"precision": HALF}, *({"strategy": name} for name in ("shard_grad_op", "shard_optim", "no_shard"))]


@pytest.mark.exhaustive
@one_at_a_time(optimizer=["AdamW", "SGD", "NAdam"], offload=OFFLOADS, settings=SETTINGS)
@ranks(2, exhaustive=(1, 3))
def test_twenty_steps_are_those_without_offload(rank, tmp_path, optimizer, offload, settings):
    def train(offload):
        training = stepping(rank, offload, optimizer, steps=20, **settings)
        return training.seen, *training.state()

    alike(train, chosen(offload, tmp_path))


@ranks(2)
def test_backward_does_not_wait_for_the_host(rank):
    plain, offloaded = (stepping(rank, offload) for offload in (None, "cpu"))
    loss = loss_of(offloaded.model, inputs(rank, 50))
    offloaded.state()
    go = hold(offloaded)
    loss.backward()
    offloaded.optimizer.step()  # which may stay where it is
    offloaded.optimizer.zero_grad()
    assert not go.is_set() and all(flat.host.pending_writes for flat in flats(offloaded))
    assert all(p.grad is None for p in offloaded.model.parameters())
    go.set()
    loss_of(plain.model, inputs(rank, 50)).backward()
    same(plain.state(), offloaded.state())


@ranks(2)
def test_what_is_done_behind_backward_changes_nothing_of_the_step(rank):
    plain, offloaded = (stepping(rank, offload) for offload in (None, "cpu"))
    for training in (plain, offloaded):
        loss = loss_of(training.model, inputs(rank, 50))
        go = hold(training) if training is offloaded else threading.Event()
        loss.backward()
        training.scheduler.step()
        for group in training.optimizer.param_groups:
            group["weight_decay"] = 100.0
        go.set()
    same(plain.state()[0], offloaded.state()[0])


@ranks(2)
def test_a_gradient_that_a_hook_keeps_stays_as_it_was(rank):
    found = []
    for offload in (None, "cpu"):
        training, kept = stepping(rank, offload), []
        weight = training.model.blocks[2][1].weight
        weight.register_post_accumulate_grad_hook(lambda p, kept=kept: kept.append(p.grad))
        for number in range(3):
            loss_of(training.model, inputs(rank, number)).backward()
        found.append([grad.to_local().clone() for grad in kept])
    same(*found)


@ranks(2)
def test_state_that_is_loaded_between_backwards_is_stepped_on(rank):
    found = []
    for offload in (None, "cpu"):
        training = stepping(rank, offload)
        state = copy.deepcopy(training.optimizer.state_dict())
        for number in range(2, 4):
            training.step(number)
        training.optimizer.load_state_dict(state)
        for number in range(4, 6):
            training.step(number)
        found.append(training.state())
    same(*found)
