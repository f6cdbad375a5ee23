"""Training with parameters and optimizer state in host memory gives, bit by bit, what it gives without."""

from __future__ import annotations

import gc
import resource
import threading

import pytest
import torch

from tests.offload.models import HALF, OFFLOADS, Training, chosen, same
from tests.support.marks import one_at_a_time, quick
from tests.support.ranks import ranks
from torch_shard.offload import Offload


@pytest.mark.parametrize("offload", quick(OFFLOADS, ["disk"]))
@one_at_a_time(optimizer=["AdamW", "SGD", "NAdam"], accumulate=[4, 1], clip=[0.5, None], precision=[None, HALF])
@ranks(2, exhaustive=(3,))
def test_it_trains_as_without(rank, tmp_path, offload, optimizer, accumulate, clip, precision):
    plain = Training(rank, None, optimizer, precision=precision)
    offloaded = Training(rank, chosen(offload, tmp_path), optimizer, precision=precision)
    for training in (plain, offloaded):
        for number in range(10):
            training.step(number, accumulate=accumulate, clip=clip)
    assert plain.seen == offloaded.seen
    same(plain.state(), offloaded.state())


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
    # A rank that was late is asked where it is, over a connection that stays.
    assert threading.active_count() <= threads + 1
    assert count_tensors() <= tensors + 10


def count_tensors():
    return sum(isinstance(found, torch.Tensor) for found in gc.get_objects())
