"""The pool of host memory: buffers come back in a fixed pattern, and it does not keep what nobody uses."""

from __future__ import annotations

import pytest
import torch

from torch_shard.errors import HostMemoryError
from torch_shard.offload.host_buffers import HostBuffers

CPU = torch.device("cpu")


def test_buffers_that_are_out_share_no_memory_and_hold_what_was_asked_for():
    pool = HostBuffers(CPU)
    sizes = [1, 4095, 4096, 4097, 16384, 36864, 36864, 36865, 100_000, 1_000_001]
    out = [pool.take(size) for size in sizes]
    for number, buffer in enumerate(out):
        buffer.memory.fill_(number)
    assert [int(buffer.memory.unique()) for buffer in out] == list(range(len(out)))
    assert all(size <= b.memory.numel() <= max(size + 4095, 1.125 * size) for b, size in zip(out, sizes, strict=True))
    assert pool.held == pool.in_use == sum(b.memory.numel() for b in out)


def test_steps_of_one_pattern_take_the_same_memory_and_no_more():
    pool, seen = HostBuffers(CPU), []
    for _ in range(5):
        out = [pool.take(size) for size in (40_000, 40_000, 1_000, 40_000)]
        seen.append([buffer.memory.data_ptr() for buffer in out])
        for buffer in reversed(out):
            pool.give(buffer)
    assert all(found == seen[0] for found in seen)
    pool.collect()
    assert pool.in_use == 0 and pool.held == 3 * 40_960 + 4096


@pytest.mark.exhaustive
def test_sizes_that_change_from_step_to_step_do_not_add_up():
    pool, most = HostBuffers(CPU), 0
    for step in range(200):
        size = 50_000 + 3_001 * (step * 7 % 100)
        out = [pool.take(size) for _ in range(8)]
        most = max(most, pool.in_use)
        assert pool.held <= 2 * most
        for buffer in reversed(out):
            pool.give(buffer)
        pool.collect()
        assert pool.held == sum(b.memory.numel() for free in pool._free.values() for b in free)


def test_memory_that_cannot_be_had_is_an_error_that_says_how_much():
    pool = HostBuffers(CPU)
    kept = pool.take(1 << 20)
    before = (pool.held, pool.in_use)
    said = (
        r"rank 0: activation_offload: 1073741824.00 GiB of host memory .* in addition to the 1.00 MiB .* are available"
        r".*Offload fewer"
    )
    with pytest.raises(HostMemoryError, match=said):
        pool.take(1 << 60)
    assert (pool.held, pool.in_use) == before
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("torch_shard.offload.host_buffers.available", lambda: None)  # a system that tells nothing
        with pytest.raises(HostMemoryError, match="the system does not provide more"):
            pool.take(1 << 60)
    assert (pool.held, pool.in_use) == before
    pool.give(kept)
    assert pool.take(1 << 20) is kept
