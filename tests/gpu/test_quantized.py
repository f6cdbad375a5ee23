"""Quantized communication on GPUs: codes are made and read on the side streams."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.compat.harness import MLP, Pair, batch, plain_backward
from tests.gpu.test_training import Delay
from tests.support.ranks import ranks
from torch_shard import Quantized
from torch_shard.errors import UnavailableError

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and torch sees none here")


class Slow(MLP):
    """The host is far ahead of the device."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(block, Delay()) for block in self.blocks)


def train_near_plain(rank: int, world_size: int, device: torch.device, kind: str) -> None:
    """A code that is read too early, or memory that is used again too early, gives values far from all others, or NaN."""
    quantized = Quantized(kind, "int8", block=16, min_size=0)
    pair = Pair(lambda: Slow().to(device), rank, world_size, quantized=quantized, timeout=60.0)
    before = [p.detach().clone() for p in pair.plain.parameters()]
    for step in range(4):
        pair.step(plain_backward, batch(rank, step).to(device), grads=False)
    for old, ours, (name, plain) in zip(before, pair.model.parameters(), pair.plain.named_parameters(), strict=True):
        moved = (plain - old).norm()
        assert (ours.detach().full_tensor() - plain).norm() < 0.2 * moved + 1e-6, name


@ranks(2, 3, timeout=240)
def test_ranks_that_share_a_gpu_train_near_plain(rank, world_size, device):
    train_near_plain(rank, world_size, device, "int8")


@pytest.mark.parametrize("kind", ["int8", "float8"])
@ranks(2, backend="nccl", timeout=240)
def test_training_over_nccl_is_near_plain(rank, world_size, device, kind):
    if kind == "float8" and torch.cuda.get_device_capability(device) < (8, 9):
        pytest.skip("needs a GPU with float8")
    train_near_plain(rank, world_size, device, kind)


def test_a_gpu_has_float8_or_says_that_it_has_not(device):
    if torch.cuda.get_device_capability(device) >= (8, 9):
        Quantized("float8").check_device(torch.device(device))
    else:
        with pytest.raises(UnavailableError, match=r"^quantized\.parameters: .* has no float8"):
            Quantized("float8").check_device(torch.device(device))
