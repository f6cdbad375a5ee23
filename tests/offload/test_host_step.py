"""The optimizer's step runs behind ``optimizer.step()``, and nobody can tell but by the time that it takes."""

from __future__ import annotations

import contextlib
import copy
import os
import select
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

import torch_shard
from tests.offload.models import Model, Training, flats, held_up, hold, inputs, loss_of, same, units
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
    for one, other in zip(plain.state(), offloaded.state(), strict=True):
        same(one, other)
    assert not is_moving(offloaded)


def everything_after(training):
    """What a training loop does behind a step."""
    training.optimizer.step()
    training.scheduler.step()
    for group in training.optimizer.param_groups:
        group["weight_decay"] = 100.0
        group["lr"] *= 100


@pytest.mark.parametrize("set_to_none", [True, False])
@ranks(2)
def test_what_is_done_behind_a_step_changes_nothing_of_it(rank, set_to_none):
    plain, offloaded = prepared(rank, clip=0.1)
    everything_after(plain)
    with held_up(offloaded):
        everything_after(offloaded)
        if set_to_none:
            offloaded.optimizer.zero_grad()
    if not set_to_none:
        offloaded.optimizer.zero_grad(set_to_none=False)
    plain.optimizer.zero_grad(set_to_none)
    for one, other in zip(plain.state(), offloaded.state(), strict=True):
        same(one, other)


READERS = {
    "parameter": lambda t: next(iter(t.model.parameters())).to_local().clone(),
    "sum": lambda t: sum(p.sum() for p in t.model.parameters()),
    "state": lambda t: next(iter(t.optimizer.state.values()))["exp_avg"].to_local().clone(),
    "gradient": lambda t: t.model.blocks[3][1].weight.grad.to_local().clone(),
    "norm": lambda t: t.engine.clip_grad_norm_(1e9),
    "state_dict": lambda t: t.model.state_dict()["blocks.2.1.weight"].to_local().clone(),
    "evaluation": lambda t: loss_of(t.model.eval(), inputs(0, 7)),
}


@pytest.mark.parametrize(
    "reader", ["parameter", "state", *exhaustive(*[r for r in READERS if r not in ("parameter", "state")])]
)
@ranks(2)
def test_who_reads_waits(rank, reader):
    plain, offloaded = prepared(rank)
    plain.optimizer.step()
    hold(offloaded, 0.2)
    offloaded.optimizer.step()
    with torch.no_grad():
        assert torch.equal(READERS[reader](plain), READERS[reader](offloaded))


@pytest.mark.exhaustive
@ranks(1)
def test_several_threads_may_read_at_once(rank):
    training, failed, interval = Training(rank, "cpu"), [], sys.getswitchinterval()
    parameters = list(training.model.parameters())

    def read(begin):
        begin.wait()
        try:
            for p in parameters:
                assert p._local is not None  # as every operation does
        except Exception as error:
            failed.append(error)

    for number in range(20):
        training.step(number)
        begin = threading.Barrier(3)
        readers = [threading.Thread(target=read, args=(begin,)) for _ in range(3)]
        sys.setswitchinterval(1e-6)
        try:
            for reader in readers:
                reader.start()
            for reader in readers:
                reader.join()
        finally:
            sys.setswitchinterval(interval)
    assert not failed


@ranks(1)
def test_counters_are_moved_on_at_once(rank):
    _, offloaded = prepared(rank)
    with held_up(offloaded):
        offloaded.optimizer.step()
        steps = {entry["step"].item() for entry in offloaded.optimizer.state.values()}
        assert is_moving(offloaded)
    assert steps == {3.0}


@ranks(1)
def test_a_counter_that_is_edited_behind_a_step_stays_as_it_was_made(rank):
    both = prepared(rank)
    for training in both:
        counters = [entry["step"] for entry in training.optimizer.state.values()]
        with held_up(training) if training is both[1] else contextlib.nullcontext():
            training.optimizer.step()
            counters[9].zero_()
            counters[12].fill_(7.0)
        training.optimizer.zero_grad()
        training.step(5)
    same(both[0].state(), both[1].state())


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


@ranks(2)
def test_a_forward_waits_for_the_units_it_comes_to_only(rank):
    _, offloaded = prepared(rank)
    offloaded.optimizer.step()  # all of it is done behind this, and the units are held up one by one
    offloaded.engine.state_dict(form="full")
    thread = offloaded.engine._runtime.host.thread
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
    for one, other in zip(both[0].state(), both[1].state(), strict=True):
        same(one, other)


@ranks(2, fresh=True)
def test_a_step_that_fails_is_raised_where_it_is_missed(rank):
    _, offloaded = prepared(rank)
    work = offloaded.engine._runtime.steps()._backends.get(offloaded.optimizer)
    if rank == 0:
        with held_up(offloaded):
            offloaded.optimizer.step()
            for flat in flats(offloaded):
                for piece in [p for runs in work._steps[id(flat)][1].all_runs for p in runs.pieces]:
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
def test_a_refused_step_has_changed_nothing(rank):
    _, offloaded = prepared(rank)
    before = offloaded.engine.state_dict(form="full")
    last = list(offloaded.model.parameters())[-1]
    offloaded.optimizer.state[last]["exp_avg"] = torch.zeros(3)
    with pytest.raises(errors.ShardError, match="exp_avg"):
        offloaded.optimizer.step()
    same(before, offloaded.engine.state_dict(form="full"))


@ranks(2)
def test_an_optimizer_of_matrices_is_refused_beside_a_gpu(rank):
    training = Training(rank, "cpu")
    optimizer = torch.optim.Muon([p for p in training.model.parameters() if p.dim() == 2])
    loss_of(training.model, inputs(rank, 0)).backward()
    before = training.engine.state_dict(form="full")
    training.engine._runtime.host.on_cuda = True  # as on a machine with one
    with pytest.raises(errors.ShardError, match="Muon needs full matrices"):
        optimizer.step()
    training.engine._runtime.host.on_cuda = False
    same(before, training.engine.state_dict(form="full"))


@ranks(2)
def test_a_gradient_that_is_kept_stays_as_it_was(rank):
    training = Training(rank, "cpu")
    training.step(0)
    loss_of(training.model, inputs(rank, 1)).backward()
    kept = {name: p.grad for name, p in training.model.named_parameters()}
    values = {name: grad.to_local().clone() for name, grad in kept.items()}
    training.optimizer.zero_grad()
    for number in range(2, 5):
        training.step(number)
    for name, grad in kept.items():
        assert torch.equal(grad.to_local(), values[name]), name


@ranks(2)
def test_a_copy_of_the_model_is_of_its_own(rank):
    _, offloaded = prepared(rank)
    with held_up(offloaded):
        offloaded.optimizer.step()
    twin = copy.deepcopy(offloaded.model)
    before = torch_shard.engine_of(twin).state_dict(form="full")
    same(before, offloaded.engine.state_dict(form="full"))
    offloaded.step(5)
    same(before, torch_shard.engine_of(twin).state_dict(form="full"))


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


@ranks(1)
def test_a_child_that_is_forked_finds_what_was_stepped(rank):
    plain, offloaded = prepared(rank)
    read, write = os.pipe()
    hold(offloaded, 0.2)
    offloaded.optimizer.step()
    plain.optimizer.step()
    expected = plain.model.blocks[3][1].weight.to_local().clone()
    child = os.fork()
    if not child:
        same_values = torch.equal(offloaded.model.blocks[3][1].weight.to_local(), expected)
        os.write(write, b"1" if same_values else b"0")
        os._exit(0)
    os.close(write)
    assert select.select([read], [], [], 20)[0] and os.read(read, 1) == b"1"
    os.waitpid(child, 0)


@ranks(1)
def test_groups_with_names_are_stepped_in_the_background(rank):
    training = Training(rank, "cpu")
    training.optimizer.param_groups[0]["name"] = "everything"
    for number in range(2):
        training.step(number)
    loss_of(training.model, inputs(rank, 99)).backward()
    with held_up(training):
        training.optimizer.step()
        assert is_moving(training)


@ranks(2)
def test_state_is_in_the_order_of_the_groups(rank):
    training = Training(rank, "cpu")
    backwards = list(training.model.parameters())[::-1]
    optimizer = torch.optim.AdamW([{"params": backwards[:5]}, {"params": backwards[5:], "lr": 0.1}])
    loss_of(training.model, inputs(rank, 0)).backward()
    optimizer.step()
    assert [id(p) for p in optimizer.state] == [id(p) for p in backwards]


@ranks(2)
def test_state_that_is_made_later_follows_that_which_there_is_as_in_torch(rank):
    found = []
    for sharded in (False, True):
        model = Model()
        names = {id(p): name for name, p in model.named_parameters()}
        if sharded:
            torch_shard.shard(model, offload="cpu")
        optimizer = torch.optim.AdamW(
            [{"params": [*model.blocks[2:].parameters()]}, {"params": [*model.blocks[:2].parameters()]}]
        )
        model.blocks[1:3].requires_grad_(False)
        for number in range(4):
            model.blocks[number].requires_grad_(True)
            loss_of(model, inputs(rank, number)).backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append([names[id(p)] for p in optimizer.state])
    assert found[0] == found[1]
