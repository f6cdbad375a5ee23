"""Plain tensors over what the host works on: as long as somebody has one the host does nothing in the background."""

from __future__ import annotations

import contextlib
import gc

import pytest
import torch

from tests.offload.models import Training, flats, held_up, hold, inputs, loss_of, same
from tests.support.marks import exhaustive, quick
from tests.support.ranks import ranks
from torch_shard import Precision
from torch_shard.offload import Offload
from torch_shard.offload.exported_tensors import ExportedTensor


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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.bool, torch.float8_e4m3fn])
def test_what_is_handed_out_is_the_memory_itself(dtype):
    whole = torch.zeros(64, dtype=torch.uint8).view(dtype)
    local = whole[2:6]
    given, result = ExportedTensor.of(local, whole)
    assert result.dtype == dtype and result.shape == local.shape and result.data_ptr() == local.data_ptr()
    version = local._version
    result.fill_(1)
    assert bool((whole[2:6].to(torch.complex64) == 1).all()) and local._version == version + 1
    assert given.is_held()


HOLDERS = {
    "tensor": lambda t: t,
    "view": lambda t: t[1:],
    "view of a view": lambda t: t.view(-1)[:2].detach(),
    "array": lambda t: t.numpy(),
    "storage": lambda t: t.untyped_storage(),
    "data": lambda t: t.data,
    "list of rows": lambda t: list(t.split(1)),
}


@pytest.mark.parametrize("holder", quick(HOLDERS, ["view of a view", "array"]))
def test_it_is_held_as_long_as_anything_made_from_it(holder):
    whole = torch.arange(8.0)
    given, result = ExportedTensor.of(whole[2:6], whole)
    held = HOLDERS[holder](result)
    del result
    gc.collect()
    assert given.is_held()
    del held
    gc.collect()
    assert not given.is_held()


def test_it_keeps_the_memory():
    whole = torch.arange(1000.0)
    _, result = ExportedTensor.of(whole[500:], None)
    del whole
    gc.collect()
    noise = [torch.full((1000,), -1.0) for _ in range(20)]
    assert torch.equal(result, torch.arange(500.0, 1000.0)) and len(noise) == 20


@pytest.mark.parametrize("what", ["parameter", *exhaustive("state", "gradient", "array")])
@ranks(1)
def test_steps_wait_for_nobody_who_has_let_go(rank, what):
    training = trained(rank)
    weight = training.model.blocks[1][1].weight
    unit = next(n for n, u in enumerate(training.engine._runtime.units) if any(p is weight for p in u.params))
    assert all(in_background(training))
    loss_of(training.model, inputs(rank, 3)).backward()
    held = {
        "parameter": lambda: weight.to_local(),
        "array": lambda: weight.to_local().numpy(),
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


@pytest.mark.parametrize(
    ("offload", "precision"), [("cpu", torch.bfloat16), *exhaustive((Offload(params=False), None), ("cpu", None))]
)
@ranks(2)
def test_an_edit_that_no_version_shows_is_computed_with(rank, offload, precision):
    found = []
    for one in (None, offload):
        training = trained(rank, one, precision=None if precision is None else Precision(param_dtype=precision))
        for p in training.model.parameters():
            array = p.to_local().numpy()
            array[:] *= 0.5
            del array
        found.append([loss_of(training.model, inputs(0, 3)).detach()])
        training.step(4)
        found[-1].append(training.state())
    same(*found)


@ranks(2)
def test_an_edit_of_gradients_that_no_version_shows_counts_in_norms(rank):
    found = []
    for offload in (None, "cpu"):
        training = trained(rank, offload)
        training.step(3, clip=0.1)  # from here on norms are taken on the way
        loss_of(training.model, inputs(rank, 9)).backward()
        for p in training.model.parameters():
            array = p.grad.to_local().numpy()
            array[:] *= 0.5
            del array
        found.append([training.engine.clip_grad_norm_(0.1)])
        training.optimizer.step()
        found[-1].append(training.state())
    same(*found)


SHARED = {"detach": lambda p: p.detach(), "data": lambda p: p.data, "local": lambda p: p.to_local()}


@pytest.mark.parametrize("share", SHARED)
@ranks(2)
def test_what_shares_memory_sees_the_step(rank, share):
    found = []
    for offload in (None, "cpu"):
        training = trained(rank, offload, optimizer="SGD")
        loss_of(training.model, inputs(rank, 9)).backward()
        weight = training.model.blocks[2][1].weight
        shared = [SHARED[share](t) for t in (weight, training.optimizer.state[weight]["momentum_buffer"], weight.grad)]
        with held_up(training) if offload and share != "local" else contextlib.nullcontext():
            training.engine.clip_grad_norm_(0.01)
            training.optimizer.step()
        found.append([t.clone() if share == "local" else t.to_local().clone() for t in shared])
    same(*found)


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
        torch.distributed.checkpoint.save(training.model.state_dict(), checkpoint_id=tmp_path)
    assert all(in_background(training))
    training.engine.save(tmp_path / "again", optimizer=training.optimizer)
    training.engine.load(tmp_path / "again", optimizer=training.optimizer)
    training.step(7)  # the first one with state that was loaded looks at it
    assert all(in_background(training))
