"""Stepping in backward, on the host thread: backward goes on, and nobody can tell but by the time that it takes."""

from __future__ import annotations

import copy
import functools
import threading

import pytest
import torch
import torch.distributed as dist

from tests.offload.models import Training, inputs, loss_of, same
from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from torch_shard import Precision, errors
from torch_shard.offload import Offload


def flats(training):
    return [flat for unit in training.engine._runtime.units for flat in unit.flats]


def stepping(rank, offload, optimizer="AdamW", steps=2, **settings):
    training = Training(rank, offload, optimizer, **settings)
    training.engine.step_in_backward(training.optimizer)
    for number in range(steps):
        training.step(number)
    return training


def held_up(training):
    """The host thread does nothing until the event that this returns is set, or the test has failed."""
    go = threading.Event()
    training.engine._runtime.host.thread.do(functools.partial(go.wait, 20))
    return go


@pytest.mark.parametrize("optimizer", ["AdamW", *exhaustive("SGD", "NAdam")])
@ranks(2, exhaustive=(1, 3))
def test_twenty_steps_are_those_without_offload(rank, optimizer):
    plain, offloaded = (stepping(rank, offload, optimizer, steps=20) for offload in (None, "cpu"))
    assert plain.seen == offloaded.seen
    same(plain.state(), offloaded.state())


SETTINGS = {
    "kept on the device": (Offload(params=False), {}),
    "bf16": ("cpu", {"precision": Precision(param_dtype=torch.bfloat16)}),
    "bf16, kept": (Offload(params=False), {"precision": Precision(param_dtype=torch.bfloat16)}),
    "shard_grad_op": ("cpu", {"strategy": "shard_grad_op"}),
    "shard_optim": ("cpu", {"strategy": "shard_optim"}),
    "no_shard": ("cpu", {"strategy": "no_shard"}),
}


@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.exhaustive
@ranks(2)
def test_other_settings_step_as_without_offload(rank, name):
    offload, settings = SETTINGS[name]
    plain, offloaded = (stepping(rank, one, steps=6, **settings) for one in (None, offload))
    assert plain.seen == offloaded.seen
    same(plain.state(), offloaded.state())


@ranks(2)
def test_it_steps_as_after_backward(rank):
    after, offloaded = Training(rank, "cpu"), stepping(rank, "cpu", steps=4)
    for number in range(4):
        after.step(number)
    assert after.seen == offloaded.seen
    same(after.state(), offloaded.state())


@ranks(2)
def test_backward_does_not_wait_for_the_host(rank):
    plain, offloaded = (stepping(rank, offload) for offload in (None, "cpu"))
    loss = loss_of(offloaded.model, inputs(rank, 50))
    offloaded.state()
    go = held_up(offloaded)
    loss.backward()
    offloaded.optimizer.step()  # which may stay where it is
    offloaded.optimizer.zero_grad()
    assert not go.is_set() and all(flat.host.moving for flat in flats(offloaded))
    assert all(p.grad is None for p in offloaded.model.parameters())
    go.set()
    loss_of(plain.model, inputs(rank, 50)).backward()
    same(plain.state(), offloaded.state())


@ranks(2)
def test_what_is_done_behind_backward_changes_nothing_of_the_step(rank):
    plain, offloaded = (stepping(rank, offload) for offload in (None, "cpu"))
    for training in (plain, offloaded):
        loss = loss_of(training.model, inputs(rank, 50))
        go = held_up(training) if training is offloaded else threading.Event()
        loss.backward()
        training.scheduler.step()
        for group in training.optimizer.param_groups:
            group["weight_decay"] = 100.0
        go.set()
    same(plain.state()[0], offloaded.state()[0])


READERS = {
    "parameter": lambda t: next(iter(t.model.parameters())).to_local().clone(),
    "state": lambda t: next(iter(t.optimizer.state.values()))["exp_avg"].to_local().clone(),
    "step": lambda t: next(iter(t.optimizer.state.values()))["step"].clone(),
    "evaluation": lambda t: loss_of(t.model.eval(), inputs(0, 7)),
    "checkpoint": lambda t: t.engine.state_dict(form="full").get("blocks.0.1.weight", 0),
}


@pytest.mark.parametrize("reader", ["parameter", *exhaustive(*[r for r in READERS if r != "parameter"])])
@ranks(2)
def test_who_reads_waits(rank, reader):
    plain, offloaded = (stepping(rank, offload) for offload in (None, "cpu"))
    losses = [loss_of(training.model, inputs(rank, 50)) for training in (plain, offloaded)]
    go = held_up(offloaded)
    for loss in losses:
        loss.backward()
    threading.Timer(0.2, go.set).start()
    with torch.no_grad():
        same(READERS[reader](plain), READERS[reader](offloaded))


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


@pytest.mark.exhaustive
@ranks(2)
def test_ordinary_steps_before_and_after_it(rank):
    def train(offload):
        training = Training(rank, offload)
        for number in range(9):
            if number in (3, 6):
                training.engine.step_in_backward(training.optimizer if number == 3 else None)
            training.step(number, clip=None if 3 <= number < 6 else 0.5, accumulate=1 if 3 <= number < 6 else 2)
        return training.state()

    same(train(None), train("cpu"))


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


@pytest.mark.exhaustive
@ranks(2, fresh=True)
def test_a_step_that_fails_is_raised_where_it_is_missed(rank):
    training = stepping(rank, "cpu")
    loss = loss_of(training.model, inputs(rank, 50))
    if rank == 0:
        go = held_up(training)
        loss.backward()
        for _, step in training.engine._runtime.in_backward._steps.values():
            for piece in [p for runs in step.all_runs for p in runs.pieces]:
                piece.state.clear()  # a kernel that finds no counter
                piece.state["step"] = "one"
        go.set()
    else:
        loss.backward()
    with pytest.raises(errors.ShardError, match=r"AdamW.step\(\) has failed in parameter group 0 \(blocks\."):
        training.model(inputs(rank, 1))
        loss_of(training.model, inputs(rank, 1)).backward()
    dist.barrier()


@pytest.mark.exhaustive
@pytest.mark.parametrize("nvme_params", [False, *exhaustive(True)])
@ranks(2)
def test_state_on_disk_is_stepped_on_as_without_offload(rank, tmp_path, nvme_params):
    disk = Offload(nvme=tmp_path, nvme_params=nvme_params)
    plain, offloaded = (stepping(rank, offload, steps=20) for offload in (None, disk))
    assert plain.seen == offloaded.seen
    same(plain.state(), offloaded.state())
    assert offloaded.engine._runtime.host.disk.transferred.read > 0


@ranks(1)
def test_what_was_read_ahead_and_is_not_stepped_on_is_given_back(rank, tmp_path):
    training = stepping(rank, Offload(nvme=tmp_path), steps=3)
    for block in (0, 1):  # what came last in backward, now comes no more
        training.model.blocks[block].requires_grad_(False)
    loss_of(training.model, inputs(rank, 3)).backward()
    loss_of(training.model, inputs(rank, 4)).backward()
    training.state()
    disk = training.engine._runtime.host.disk
    disk.flush()
    assert sum(region.wanted for region in disk._regions.values()) <= 2  # one unit's, two moments
