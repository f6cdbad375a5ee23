"""The pool of host memory: buffers come back in a fixed pattern, and it does not keep what nobody uses."""

from __future__ import annotations

import pytest
import torch

from torch_shard.errors import UnavailableError
from torch_shard.host_buffers import HostBuffers, _count, _size_class


def test_buffers_that_are_out_share_no_memory_and_hold_what_was_asked_for():
    pool = HostBuffers(pinned=False)
    sizes = [1, 511, 512, 513, 16384, 36864, 36864, 36865, 100_000, 1_000_001]
    out = [pool.take(size) for size in sizes]
    for number, buffer in enumerate(out):
        buffer.memory.fill_(number)
    assert [int(buffer.memory.unique()) for buffer in out] == list(range(len(out)))
    assert all(b.memory.numel() >= size and b.memory.data_ptr() % 16 == 0 for b, size in zip(out, sizes, strict=True))
    assert all(
        b.memory.numel() <= max(512, 1.125 * size) for b, size in zip(out[2:], sizes[2:], strict=True) if size > 8192
    )


def test_steps_of_one_pattern_take_the_same_memory_and_no_more():
    pool, seen = HostBuffers(pinned=False), []
    for _ in range(5):
        out = [pool.take(size) for size in (40_000, 40_000, 1_000, 40_000)]
        seen.append([buffer.memory.data_ptr() for buffer in out])
        for buffer in reversed(out):
            pool.give(buffer)
    assert all(found == seen[0] for found in seen)
    pool.collect()
    assert pool.in_use == 0


def test_sizes_that_change_from_step_to_step_do_not_add_up():
    pool, most = HostBuffers(pinned=False), 0
    for step in range(200):
        size = 50_000 + 3_001 * (step * 7 % 100)
        out = [pool.take(size) for _ in range(8)]
        most = max(most, pool.in_use)
        for buffer in reversed(out):
            pool.give(buffer)
        assert pool.held <= 2 * most + 8 * _size_class(size)
        assert pool.held == sum(slab.memory.numel() for slab in pool._slabs)


@pytest.mark.parametrize("size", [512, 1024, 5 * 1024, 33 << 20, 64 << 20, 100 << 20, 127 << 20])
def test_slabs_waste_little_of_a_power_of_two(size):
    size = _size_class(size)
    slab = size * _count(size)
    assert (1 << (slab - 1).bit_length()) / slab <= 1.24


def test_memory_that_cannot_be_had_is_an_error_that_says_how_much():
    pool = HostBuffers(pinned=False)
    kept = pool.take(1 << 20)
    before = (pool.held, pool.in_use)
    with pytest.raises(
        UnavailableError, match=rf"rank 0: activation_offload: {1 << 60} bytes .* beside {1 << 20}.*Offload fewer"
    ):
        pool.take(1 << 60)
    assert (pool.held, pool.in_use) == before
    pool.give(kept)
    assert torch.equal(pool.take(1 << 20).memory[:1], kept.memory[:1])
