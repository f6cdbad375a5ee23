"""Training with parameters and optimizer state in host memory gives, bit by bit, what it gives without."""

from __future__ import annotations

import gc
import resource
import threading

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

import torch_shard
from tests.offload.models import Model, Training, same
from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from torch_shard import Precision
from torch_shard.offload import Offload

KEEPS = Offload(params=False)


def trains_alike(rank, offload, steps, optimizer="AdamW", settings=None, **how):
    plain = Training(rank, None, optimizer, **(settings or {}))
    offloaded = Training(rank, offload, optimizer, **(settings or {}))
    for training in (plain, offloaded):
        for number in range(steps):
            training.step(number, **how)
    assert plain.seen == offloaded.seen
    for one, other in zip(plain.state(), offloaded.state(), strict=True):
        same(one, other)


@pytest.mark.parametrize("clip", [0.5, *exhaustive(None)])
@pytest.mark.parametrize("accumulate", [4, *exhaustive(1)])
@ranks(2, exhaustive=(1, 3))
def test_it_trains_as_without(rank, accumulate, clip):
    trains_alike(rank, "cpu", 20, accumulate=accumulate, clip=clip)


@pytest.mark.parametrize("clip", [None, 0.5])
@ranks(2, exhaustive=(1,))
def test_accumulation_under_no_sync_trains_as_without(rank, clip):
    trains_alike(rank, "cpu", 6, accumulate=3, clip=clip, sync=False)


@pytest.mark.parametrize("optimizer", ["SGD", *exhaustive("NAdam")])
@ranks(2, exhaustive=(1,))
def test_other_optimizers_train_as_without(rank, optimizer):
    trains_alike(rank, "cpu", 6, optimizer, clip=0.5)


@pytest.mark.parametrize("precision", [None, *exhaustive(Precision(param_dtype=torch.bfloat16))])
@ranks(2, exhaustive=(1,))
def test_slices_kept_on_the_device_train_as_without(rank, precision):
    trains_alike(rank, KEEPS, 6, settings={"precision": precision}, clip=0.5)


@pytest.mark.parametrize(
    "precision",
    [
        Precision(param_dtype=torch.bfloat16),
        *exhaustive(
            Precision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
            Precision(param_dtype=torch.bfloat16, keep_low_precision_grads=True),
        ),
    ],
)
@ranks(2, exhaustive=(1,))
def test_mixed_precision_trains_as_without(rank, precision):
    trains_alike(rank, "cpu", 6, settings={"precision": precision}, accumulate=2, clip=0.5)


@pytest.mark.parametrize("order", [1.0, 3.0, float("inf")])
@pytest.mark.exhaustive
@ranks(2)
def test_norms_of_other_orders_clip_as_without(rank, order):
    plain, offloaded = Training(rank, None, "SGD"), Training(rank, "cpu", "SGD")
    for training in (plain, offloaded):
        for number in range(3):
            training.step(number, accumulate=2)
            training.engine.clip_grad_norm_(0.1, order)
    assert plain.seen == offloaded.seen
    same(plain.state()[0], offloaded.state()[0])


@pytest.mark.parametrize("optimizer", ["AdamW", *exhaustive("SGD")])
@ranks(2, exhaustive=(1,))
def test_stepping_in_backward_trains_as_without(rank, optimizer):
    plain, offloaded = Training(rank, None, optimizer), Training(rank, "cpu", optimizer)
    for training in (plain, offloaded):
        training.engine.step_in_backward(training.optimizer)
        for number in range(5):
            training.step(number)
    assert plain.seen == offloaded.seen
    for one, other in zip(plain.state(), offloaded.state(), strict=True):
        same(one, other)


@ranks(2)
def test_a_checkpoint_goes_on_with_another_number_of_ranks_and_without_offload(rank, tmp_path):
    offloaded, plain = Training(rank, "cpu"), Training(rank, None)
    for training in (offloaded, plain):
        for number in range(3):
            training.step(number)
    offloaded.engine.save(tmp_path, optimizer=offloaded.optimizer)  # the step is under way
    parameters, states = plain.state()  # whole on the first rank
    for offload in ("cpu", None):
        group = dist.new_group([0]), dist.new_group([1])
        model = Model()
        engine = torch_shard.shard(model, offload=offload, mesh=DeviceMesh.from_group(group[rank], "cpu"))
        optimizer = torch.optim.AdamW(model.parameters())
        engine.load(tmp_path, optimizer=optimizer)
        found = engine.state_dict(form="full"), engine.optim_state_dict(optimizer)["state"]
        if rank == 0:
            same(found[0], parameters)
            same(found[1], states["state"])


@pytest.mark.exhaustive
@ranks(2, timeout=300)
def test_five_hundred_steps_take_no_more_memory(rank, tmp_path):
    training = Training(rank, Offload(nvme=tmp_path), units=["blocks.*"])

    def held():
        gc.collect()
        with open("/proc/self/statm") as file:
            return int(file.read().split()[1]) * resource.getpagesize()

    for number in range(100):
        training.step(number, accumulate=2, clip=0.5)
    training.state()
    before, threads, tensors = held(), threading.active_count(), count_tensors()
    for number in range(100, 600):
        training.step(number, accumulate=2, clip=0.5)
    training.state()
    assert held() - before < 4 << 20
    assert threading.active_count() == threads
    assert count_tensors() <= tensors + 10


def count_tensors():
    return sum(isinstance(found, torch.Tensor) for found in gc.get_objects())
