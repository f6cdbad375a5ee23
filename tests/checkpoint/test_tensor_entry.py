"""Entries of sharded files: what torch.save puts around values that it never saw."""

from __future__ import annotations

import io
import resource

import pytest
import torch

from tests.checkpoint.helpers import bits
from torch_shard.checkpoint.format.tensor_entry import ALIGNMENT, surroundings

DTYPES = [
    torch.float32,
    torch.bfloat16,
    torch.float64,
    torch.float8_e4m3fn,
    torch.bool,
    torch.int64,
    torch.uint16,
    torch.uint8,
    torch.complex64,
]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", [(), (3, 5), (0, 4), (2, 1, 4)], ids=str)
def test_torch_loads_it(dtype, shape):
    value = torch.randint(0, 2, shape).to(dtype)
    head, tail = surroundings(value.shape, dtype)
    assert len(head) % ALIGNMENT == 0 or not value.numel()
    found = torch.load(io.BytesIO(head + bytes(bits(value).tolist()) + tail), weights_only=True)
    assert found.dtype == dtype and found.shape == value.shape and torch.equal(bits(found), bits(value))


def test_surroundings_of_a_large_tensor_take_no_memory():
    """Where torch is told to fill new tensors, too."""
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    torch.use_deterministic_algorithms(True)
    try:
        head, tail = surroundings(torch.Size((5 << 30,)), torch.uint8)
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(head) + len(tail) < 4096
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 1 << 20  # KiB
