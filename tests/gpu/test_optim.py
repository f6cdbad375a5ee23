"""Optimizers on GPUs: what torch chooses there for plain tensors, and what stays on the device."""

from __future__ import annotations

import pytest
import torch

from tests.compat.harness import plain_backward, train_both
from tests.gpu.models import GPT, tokens
from tests.optim.helpers import by_ndim, same_optimizers
from tests.support.marks import exhaustive
from tests.support.ranks import ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and torch sees none here")

O = torch.optim
OPTIMIZERS = {
    "AdamW": lambda m: O.AdamW(by_ndim(m), lr=0.01),
    "AdamW for-loop": lambda m: O.AdamW(by_ndim(m), lr=0.01, foreach=False),
    "AdamW fused": lambda m: O.AdamW(by_ndim(m), lr=0.01, fused=True),
    "AdamW capturable": lambda m: O.AdamW(by_ndim(m), lr=0.01, capturable=True),
    "AdamW tensor lr": lambda m: O.AdamW(by_ndim(m), lr=torch.tensor(0.01, device="cuda"), fused=True),
    "NAdam capturable": lambda m: O.NAdam(by_ndim(m), lr=0.01, capturable=True),
    "SGD": lambda m: O.SGD(by_ndim(m), lr=0.1, momentum=0.9),
    "SGD fused": lambda m: O.SGD(by_ndim(m), lr=0.1, momentum=0.9, fused=True),
}


def train(name, rank, world_size, device, **settings):
    return train_both(
        lambda: GPT().to(device),
        rank,
        world_size,
        make_batch=lambda rank, step: tokens(rank, step, device),
        optimizer=OPTIMIZERS[name],
        steps=4,
        **{"unit_bytes": 2000, "timeout": 60.0, **settings},
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
@ranks(2, timeout=240)
def test_an_optimizer_steps_as_on_the_plain_model(rank, world_size, device, name):
    pair = train(name, rank, world_size, device)
    same_optimizers(pair.optimizer, pair.plain_optimizer)
    counters = {v.device.type for own in pair.optimizer.state.values() for k, v in own.items() if k == "step"}
    assert counters <= {"cuda" if "capturable" in name or "fused" in name or "tensor" in name else "cpu"}


@pytest.mark.parametrize("name", ["AdamW", *exhaustive("SGD fused")])
@ranks(1, 2, backend="nccl", timeout=240)
def test_over_nccl(rank, world_size, device, name):
    pair = train(name, rank, world_size, device)
    same_optimizers(pair.optimizer, pair.plain_optimizer)


@ranks(2, timeout=240)
def test_an_ordinary_step_does_not_wait_for_the_device(rank, world_size, device):
    pair = train("AdamW fused", rank, world_size, device)
    plain_backward(pair.model, tokens(rank, 9, device))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        pair.optimizer.step()
    finally:
        torch.cuda.set_sync_debug_mode("default")


@ranks(2, timeout=240)
def test_stepping_in_backward(rank, world_size, device):
    pair = train("AdamW", rank, world_size, device)
    pair.engine.step_in_backward(pair.optimizer)
    for step in range(4, 7):
        pair.backward(plain_backward, tokens(rank, step, device))
        pair.plain_optimizer.step()
        pair.plain_optimizer.zero_grad()
    pair.check()
