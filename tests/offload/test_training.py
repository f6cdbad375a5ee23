"""Training with parameters and optimizer state in host memory gives, bit by bit, what it gives without."""

from __future__ import annotations

import pytest
import torch

from tests.marks import exhaustive
from tests.offload.models import Training, same
from tests.ranks import ranks
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


@pytest.mark.parametrize("clip", [None, 0.5])
@pytest.mark.parametrize("accumulate", [1, 4])
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


@pytest.mark.parametrize("strategy", ["shard_grad_op", "shard_optim", "no_shard"])
@pytest.mark.exhaustive
@ranks(2)
def test_every_strategy_trains_as_without(rank, strategy):
    trains_alike(rank, "cpu", 6, settings={"strategy": strategy}, accumulate=2, clip=0.5)


@pytest.mark.exhaustive
@ranks(4)
def test_two_copies_train_as_without(rank):
    trains_alike(rank, "cpu", 6, settings={"strategy": "hybrid_shard", "shard_size": 2}, accumulate=2, clip=0.5)


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
