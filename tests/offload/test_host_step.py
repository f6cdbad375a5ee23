"""The optimizer's step runs behind ``optimizer.step()``, and nobody can tell but by the time that it takes."""

from __future__ import annotations

import threading
import time

import pytest
import torch
import torch.distributed as dist

from tests.offload.beside_gpu import beside_gpu
from tests.offload.models import Training, flats, held_up, hold, inputs, loss_of, same, units
from tests.support.inside import runtime_of
from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from torch_shard import errors


def is_moving(training):
    return any(flat.host.pending_writes for flat in flats(training))


def prepared(rank, clip=None):
    """One training with offload and one without, after two steps, with gradients of a third one."""
    both = Training(rank, None), Training(rank, "cpu")
    for training in both:
        for number in range(2):
            training.step(number)
        loss_of(training.model, inputs(rank, 99)).backward()
        if clip is not None:
            training.engine.clip_grad_norm_(clip)
    return both


@ranks(2)
def test_step_returns_before_the_host_has_stepped(rank):
    plain, offloaded = prepared(rank)
    plain.optimizer.step()
    with held_up(offloaded):
        offloaded.optimizer.step()
        assert is_moving(offloaded)
    same(plain.state(), offloaded.state())
    assert not is_moving(offloaded)


@ranks(1)
def test_state_that_an_option_asks_for_later_is_there_when_step_returns(rank):
    found = []
    for offload in (None, "cpu"):
        training = Training(rank, offload, lambda m: torch.optim.SGD(m.parameters(), lr=0.1))
        for number in range(4):
            training.optimizer.param_groups[0]["momentum"] = 0.9 if number > 2 else 0.0
            loss_of(training.model, inputs(rank, number)).backward()
            if offload:
                hold(training, 0.1)
            training.optimizer.step()
        found.append((len(training.optimizer.state), training.engine.optim_state_dict(training.optimizer)))
    assert found[0][0] > 0
    same(*found)


@pytest.mark.exhaustive
@ranks(2)
def test_a_forward_waits_for_the_units_it_comes_to_only(rank):
    _, offloaded = prepared(rank)
    offloaded.optimizer.step()  # all of it is done behind this, and the units are held up one by one
    offloaded.engine.state_dict(form="full")
    thread = runtime_of(offloaded.engine).host.thread
    last = units(offloaded)[-1]
    go, reached = threading.Event(), []
    for flat in last.flats:
        flat.host.pending_writes.begin(thread.do(go.wait), flat.params)
    hook = offloaded.model.blocks[1].register_forward_hook(lambda *_: reached.append(time.monotonic()))
    threading.Timer(0.5, go.set).start()
    begin = time.monotonic()
    with torch.no_grad():
        offloaded.model(inputs(rank, 1))
    end = time.monotonic()
    hook.remove()
    assert end - begin > 0.4 and reached[0] - begin < 0.3


@ranks(2)
def test_a_step_does_not_wait_for_one_on_other_units(rank):
    both = [Training(rank, o, lambda m: torch.optim.AdamW(m.blocks[:2].parameters(), lr=1e-2)) for o in (None, "cpu")]
    others = [torch.optim.AdamW(t.model.blocks[2:].parameters(), lr=1e-2) for t in both]
    for training, other in zip(both, others, strict=True):
        for number in range(3):
            loss_of(training.model, inputs(rank, number)).backward()
            if number < 2 or training is both[0]:
                training.optimizer.step()
                other.step()
                training.optimizer.zero_grad()
                other.zero_grad()
    with held_up(both[1]):
        both[1].optimizer.step()
        others[1].step()
        assert is_moving(both[1])
    same(both[0].state(), both[1].state())


@ranks(2, fresh=True)
def test_a_step_that_fails_is_raised_where_it_is_missed(rank):
    _, offloaded = prepared(rank)
    work = runtime_of(offloaded.engine).steps()._backends.get(offloaded.optimizer)
    if rank == 0:
        with held_up(offloaded):
            offloaded.optimizer.step()
            for flat in flats(offloaded):
                for piece in [p for runs in work._steps[flat].all_runs for p in runs.pieces]:
                    piece.state.clear()  # a kernel that finds no counter
                    piece.state["step"] = "one"
    else:
        offloaded.optimizer.step()
    with pytest.raises(errors.ShardError, match=r"AdamW.step\(\) has failed in parameter group 0 \(blocks\.0"):
        offloaded.model(inputs(rank, 1))
        loss_of(offloaded.model, inputs(rank, 1)).backward()
    dist.barrier()


@ranks(1)
def test_a_forward_does_not_wait_for_gradients(rank):
    _, offloaded = prepared(rank)
    offloaded.engine.state_dict(form="full")
    go = hold(offloaded, 600.0)
    loss_of(offloaded.model, inputs(rank, 1)).backward()
    loss_of(offloaded.model, inputs(rank, 2))  # would wait
    go.set()


@pytest.mark.parametrize("optimizer", ["SGD", *exhaustive("AdamW")])
@ranks(2, exhaustive=(1,))
def test_a_model_that_is_closed_right_behind_a_step_has_that_steps_weights(rank, optimizer):
    states = []
    for offload in (None, "cpu"):
        training = Training(rank, offload, optimizer)
        for number in range(4):
            training.step(number)
        training.engine.close(training.optimizer)
        assert all(type(p) is torch.nn.Parameter for p in training.model.parameters())
        states.append(dict(training.model.state_dict()))
    same(*states)


@ranks(2)
def test_an_optimizer_of_matrices_is_refused_beside_a_gpu(rank):
    training = Training(rank, "cpu")
    optimizer = torch.optim.Muon([p for p in training.model.parameters() if p.dim() == 2])
    loss_of(training.model, inputs(rank, 0)).backward()
    before = training.engine.state_dict(form="full")
    with (
        beside_gpu(runtime_of(training.engine).host),
        pytest.raises(errors.ShardError, match="Muon needs full matrices"),
    ):
        optimizer.step()
    same(before, training.engine.state_dict(form="full"))


@ranks(2)
def test_statistics_tell_what_was_waited_for_the_host_and_wait_for_nothing(rank):
    _, offloaded = prepared(rank)
    offloaded.engine.state_dict(form="full")
    before = offloaded.engine.statistics()
    go = hold(offloaded)
    offloaded.optimizer.step()
    held = offloaded.engine.memory_summary(offloaded.optimizer)
    assert is_moving(offloaded)
    threading.Timer(0.2, go.set).start()
    offloaded.engine.state_dict(form="full")
    assert 0.1 < offloaded.engine.statistics().since(before).host_wait < 5
    assert held == offloaded.engine.memory_summary(offloaded.optimizer)
