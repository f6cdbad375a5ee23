"""The model of the caching allocator, against hand-computed numbers, a model written again the slow way, and a device's own.

torch has nothing without a device to compare with: torch.cuda._memory_viz only draws what a device has recorded.
"""

from __future__ import annotations

import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import many, quick
from torch_shard.plan.caching_allocator import Block, CachingAllocator

KIB, MIB = 1 << 10, 1 << 20


def reserves(*sizes: int) -> int:
    allocator = CachingAllocator()
    for size in sizes:
        allocator.allocate(size)
    return allocator.reserved


# The rules, each with the constant that it follows from.


@pytest.mark.parametrize(
    ("nbytes", "rounded"), [(1, 512), (511, 512), (512, 512), (513, 1024), (1025, 1536), (MIB + 1, MIB + 512)]
)
def test_sizes_are_rounded_to_blocks(nbytes: int, rounded: int) -> None:
    """To multiples of kMinBlockSize = 512."""
    allocator = CachingAllocator()
    block = allocator.allocate(nbytes)
    assert (block.size, allocator.allocated) == (rounded, rounded)


@pytest.mark.parametrize(
    ("nbytes", "segment"),
    [
        (1, 2 * MIB),  # kSmallBuffer
        (MIB, 2 * MIB),  # kSmallSize, which rounded sizes are compared with
        (MIB + 1, 20 * MIB),  # large_segment_size
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB - 511, 10 * MIB),  # kMinLargeAlloc, when rounded
        (10 * MIB, 10 * MIB),
        (10 * MIB + 1, 12 * MIB),  # kRoundLarge
        (101 * MIB, 102 * MIB),
    ],
)
def test_segments_have_the_size_of_their_pool(nbytes: int, segment: int) -> None:
    allocator = CachingAllocator()
    block = allocator.allocate(nbytes)
    assert allocator.reserved == segment
    allocator.free(block)
    assert (allocator.allocated, allocator.reserved) == (0, segment)
    allocator.allocate(nbytes)
    assert allocator.reserved == segment


def test_segments_are_shared_until_they_are_full() -> None:
    assert reserves(*[MIB] * 2) == 2 * MIB
    assert reserves(*[MIB] * 3) == 4 * MIB
    assert reserves(*[4 * KIB] * 512) == 2 * MIB
    assert reserves(*[4 * KIB] * 513) == 4 * MIB
    assert reserves(9 * MIB, 9 * MIB) == 20 * MIB
    assert reserves(9 * MIB, 9 * MIB, 2 * MIB) == 20 * MIB
    assert reserves(9 * MIB, 9 * MIB, 2 * MIB + 1) == 40 * MIB
    assert reserves(9 * MIB, 11 * MIB) == 20 * MIB  # what is cached comes before a segment of its own size


def test_a_remainder_is_split_off_if_it_is_of_use() -> None:
    """In the large pool, if it is larger than kSmallSize; in the small pool from kMinBlockSize on."""
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(9 * MIB))
    whole = allocator.allocate(19 * MIB)
    assert (whole.size, allocator.allocated) == (20 * MIB, 20 * MIB)
    allocator.free(whole)
    assert allocator.allocate(19 * MIB - 512).size == 19 * MIB - 512
    assert allocator.allocate(MIB + 512).size == MIB + 512  # the remainder
    assert allocator.reserved == 20 * MIB
    assert reserves(2 * MIB - 512, 512) == 22 * MIB
    assert reserves(MIB - 512, MIB, 512) == 2 * MIB


def test_the_smallest_block_that_fits_is_used_and_of_equal_ones_the_lowest() -> None:
    allocator = CachingAllocator()
    blocks = [allocator.allocate(size * MIB) for size in (40, 30, 30, 50)]
    for block in reversed(blocks):
        allocator.free(block)
    assert allocator.allocate(29 * MIB).address == blocks[1].address
    assert allocator.allocate(29 * MIB).address == blocks[2].address
    assert allocator.allocate(29 * MIB).address == blocks[0].address
    assert allocator.allocate(11 * MIB).address == blocks[0].address + 29 * MIB


def test_streams_and_pools_use_no_memory_of_each_other() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(9 * MIB))
    _, other = allocator.allocate(MIB), allocator.allocate(9 * MIB, stream=1)
    assert allocator.reserved == (20 + 2 + 20) * MIB
    allocator.free(other)
    allocator.allocate(9 * MIB, stream=1)
    assert allocator.reserved == (20 + 2 + 20) * MIB


def test_freed_blocks_merge_on_both_sides() -> None:
    allocator = CachingAllocator()
    a, b, c, d = (allocator.allocate(512 * KIB) for _ in range(4))
    for block in (a, c, b):
        allocator.free(block)
    assert allocator.allocate(1024 * KIB).address == a.address
    assert allocator.allocate(512 * KIB).address == c.address
    assert (d.size, allocator.reserved) == (512 * KIB, 2 * MIB)


def test_the_peak_outlasts_frees() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(100 * MIB))
    allocator.allocate(30 * MIB)
    assert (allocator.allocated, allocator.peak_allocated, allocator.reserved) == (30 * MIB, 100 * MIB, 100 * MIB)


def test_nothing_takes_nothing() -> None:
    allocator = CachingAllocator()
    block = allocator.allocate(0)
    allocator.free(block)
    assert (block.size, allocator.allocated, allocator.reserved) == (0, 0, 0)


# The same once more as plain lists: a segment is a list of runs of bytes, each free, or a number of an allocation.

FREE = -1


class Reference:
    """The allocator by linear search."""

    def __init__(self) -> None:
        self.pools: dict[tuple[bool, int], list[list[list[int]]]] = {}

    def runs(self) -> list[list[int]]:
        return [run for segments in self.pools.values() for segment in segments for run in segment]

    @property
    def reserved(self) -> int:
        return sum(size for size, _ in self.runs())

    @property
    def allocated(self) -> int:
        return sum(size for size, state in self.runs() if state >= 0)

    def allocate(self, number: int, nbytes: int, stream: int) -> None:
        size = (nbytes + 511) // 512 * 512
        small = size <= MIB
        segments = self.pools.setdefault((small, stream), [])
        fitting = [run for segment in segments for run in segment if run[1] == FREE and run[0] >= size]
        if fitting:
            run = min(fitting, key=lambda run: run[0])
        else:
            own = 2 * MIB if small else 20 * MIB if size < 10 * MIB else (size + 2 * MIB - 1) // (2 * MIB) * 2 * MIB
            run = [own, FREE]
            segments.append([run])
        rest = run[0] - size
        segment = next(s for s in segments if any(r is run for r in s))
        if rest >= 512 if small else rest > MIB:
            segment.insert([r is run for r in segment].index(True) + 1, [rest, FREE])
            run[0] = size
        run[1] = number

    def free(self, number: int) -> None:
        next(run for run in self.runs() if run[1] == number)[1] = FREE
        for segments in self.pools.values():
            for segment in segments:
                for i in reversed(range(1, len(segment))):
                    if segment[i][1] == segment[i - 1][1] == FREE:
                        segment[i - 1][0] += segment.pop(i)[0]


sizes = st.one_of(
    st.integers(1, 4 * KIB),
    st.integers(1, 8).map(lambda n: n * 256 * KIB),
    st.integers(1, 80).map(lambda n: n * MIB),
    st.integers(MIB, 12 * MIB),
)
# An allocation of some bytes on a stream, or a free of one of those that are live.
events = st.lists(st.one_of(st.tuples(sizes, st.integers(0, 1)), st.integers(0, 50)), max_size=40)


def hold(events: list[tuple[int, int] | int]) -> None:
    """Assert after each event that the allocator has what the reference has, and the invariants of any allocator."""
    allocator, reference = CachingAllocator(), Reference()
    live: dict[int, Block] = {}
    asked: dict[int, int] = {}
    peak = 0
    for number, event in enumerate(events):
        if isinstance(event, tuple):
            live[number], asked[number] = allocator.allocate(*event), event[0]
            reference.allocate(number, *event)
        elif live:
            freed = sorted(live)[event % len(live)]
            allocator.free(live.pop(freed))
            reference.free(freed)
        assert (allocator.allocated, allocator.reserved) == (reference.allocated, reference.reserved)
        assert {n: b.size for n, b in live.items()} == {n: size for size, n in reference.runs() if n >= 0}
        assert sum(asked[n] for n in live) <= allocator.allocated <= allocator.reserved
        peak = max(peak, allocator.allocated)
        placed = sorted((b.address, b.address + b.size) for b in live.values())
        assert all(end <= start for (_, end), (start, _) in zip(placed, placed[1:], strict=False))
    assert allocator.peak_allocated == peak
    for block in live.values():
        allocator.free(block)
    assert allocator.allocated == 0


@quick(15)
@given(events)
def test_every_trace_takes_what_the_reference_takes(events):
    hold(events)


@many(3000)
@given(events)
def test_many_traces_take_what_the_reference_takes(events):
    hold(events)


@quick(8)
@given(st.lists(sizes, min_size=1, max_size=12), st.data())
def test_the_order_of_frees_leaves_the_same_memory(sizes, data):
    freed = data.draw(st.lists(st.sampled_from(range(len(sizes))), unique=True))
    left = []
    for order in (freed, sorted(freed)):
        allocator = CachingAllocator()
        blocks = [allocator.allocate(size) for size in sizes]
        for i in order:
            allocator.free(blocks[i])
        # What can be allocated now depends on the free blocks.
        state = [allocator.allocated, allocator.reserved]
        state += [allocator.allocate(size).address for size in sizes]
        left.append([*state, allocator.reserved])
    assert left[0] == left[1]


@pytest.mark.gpu
def test_a_device_takes_what_is_predicted() -> None:
    """On a stream of its own, so that nothing cached by others serves it."""
    draw, stream, allocator = random.Random(0), torch.cuda.Stream(), CachingAllocator()
    tensors: list[tuple[torch.Tensor, Block]] = []
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated(), torch.cuda.memory_reserved()
    with torch.cuda.stream(stream):
        for _ in range(2000):
            if draw.random() < 0.55:
                nbytes = int(2 ** draw.uniform(0, 25))
                tensors.append((torch.empty(nbytes, dtype=torch.uint8, device="cuda"), allocator.allocate(nbytes)))
            elif tensors:
                tensor, block = tensors.pop(draw.randrange(len(tensors)))
                del tensor
                allocator.free(block)
            taken = torch.cuda.memory_allocated() - before[0], torch.cuda.memory_reserved() - before[1]
            assert taken == (allocator.allocated, allocator.reserved)
