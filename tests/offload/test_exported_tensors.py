"""Plain tensors over what the host works on: as long as somebody has one the host does nothing in the background."""

from __future__ import annotations

import pytest
import torch.distributed.checkpoint as dcp

from tests.offload.models import Training, flats, hold, inputs, loss_of
from tests.support.inside import runtime_of
from tests.support.marks import exhaustive
from tests.support.ranks import ranks


def trained(rank, offload="cpu", **settings):
    training = Training(rank, offload, **settings)
    for number in range(2):
        training.step(number)
    return training


def in_background(training):
    """Whether each flat buffer is stepped on behind optimizer.step()."""
    loss_of(training.model, inputs(training.rank, 50)).backward()
    training.engine.clip_grad_norm_(1e9)  # all gradients are there
    go = hold(training, 0.5)
    training.optimizer.step()
    found = [bool(flat.host.pending_writes) for flat in flats(training)]
    go.set()
    training.optimizer.zero_grad()
    return found


@pytest.mark.parametrize("what", ["view of a view", *exhaustive("parameter", "array", "storage", "state", "gradient")])
@ranks(1)
def test_steps_wait_for_nobody_who_has_let_go(rank, what):
    training = trained(rank)
    weight = training.model.blocks[1][1].weight
    unit = next(n for n, u in enumerate(runtime_of(training.engine).units) if any(p is weight for p in u.params))
    assert all(in_background(training))
    loss_of(training.model, inputs(rank, 3)).backward()
    held = {
        "parameter": lambda: weight.to_local(),
        "view of a view": lambda: weight.to_local().view(-1)[:2].detach(),
        "array": lambda: weight.to_local().numpy(),
        "storage": lambda: weight.to_local().untyped_storage(),
        "state": lambda: training.optimizer.state[weight]["exp_avg"].to_local(),
        "gradient": lambda: weight.grad.to_local(),
    }[what]()
    assert what == "gradient" or [not found for found in in_background(training)].index(True) == unit
    training.optimizer.zero_grad()
    del held
    assert all(in_background(training))


@ranks(1)
def test_a_slice_that_is_read_costs_no_step_in_the_training_thread(rank):
    training = trained(rank)
    for p in training.model.parameters():
        p.to_local().clone()
        print(p.to_local().abs().max(), p)
    assert all(in_background(training))


@ranks(2)
def test_a_tensor_from_between_forward_and_backward_is_no_edit(rank):
    training = trained(rank)
    loss = loss_of(training.model, inputs(rank, 3))
    for p in training.model.parameters():
        p.to_local().sum()
    loss.backward()
    training.optimizer.step()


@pytest.mark.parametrize("copy", ["engine", *exhaustive("state_dict", "full")])
@ranks(2)
def test_a_checkpoint_costs_no_step_in_the_training_thread(rank, copy, tmp_path):
    training = trained(rank)
    if copy == "engine":
        training.engine.save(tmp_path, optimizer=training.optimizer)
    elif copy == "full":
        training.state()
    else:
        dcp.save(training.model.state_dict(), checkpoint_id=tmp_path)
    assert all(in_background(training))
    training.engine.save(tmp_path / "again", optimizer=training.optimizer)
    training.engine.load(tmp_path / "again", optimizer=training.optimizer)
    training.step(7)  # the first one with state that was loaded looks at it
    assert all(in_background(training))
