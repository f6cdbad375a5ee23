"""The model of the caching allocator, against hand-computed numbers, a model written again the slow way, and a device's own.

torch has nothing without a device to compare with: torch.cuda._memory_viz only draws what a device has recorded.
"""

from __future__ import annotations

import pickle
import random
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import many, quick
from torch_shard.plan.caching_allocator import Block, CachingAllocator, OutOfDeviceMemory

KIB, MIB = 1 << 10, 1 << 20


def reserves(*sizes: int, **settings: int) -> int:
    allocator = CachingAllocator(**settings)
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
    assert (block.size, block.requested, allocator.allocated) == (rounded, nbytes, rounded)


@pytest.mark.parametrize(
    ("nbytes", "rounded"),
    [
        (1200, 1536),  # not beyond 4 * kMinBlockSize: rounded as ever
        (2048, 2048),
        (2049, 2560),  # between 2048 and 4096 in steps of 512
        (9000, 10240),  # between 8192 and 16384 in steps of 2048
        (16384, 16384),
        (33 * MIB, 40 * MIB),  # between 32 and 64 MiB in steps of 8
    ],
)
def test_sizes_are_rounded_by_divisions_of_powers_of_two(nbytes: int, rounded: int) -> None:
    """As roundup_power2_next_division does."""
    assert CachingAllocator(roundup_power2_divisions=4).allocate(nbytes).size == rounded


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
    assert allocator.reserved == allocator.peak_reserved == segment
    allocator.free(block)
    assert (allocator.allocated, allocator.reserved) == (0, segment)
    allocator.empty_cache()
    assert (allocator.reserved, allocator.peak_reserved) == (0, segment)


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
    small, other = allocator.allocate(MIB), allocator.allocate(9 * MIB, stream=1)
    assert allocator.reserved == (20 + 2 + 20) * MIB
    assert (small.stream, other.stream) == (0, 1)
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


def test_peaks_outlast_frees_and_begin_anew_when_told() -> None:
    allocator = CachingAllocator()
    allocator.free(allocator.allocate(100 * MIB))
    allocator.empty_cache()
    allocator.allocate(30 * MIB)
    assert (allocator.peak_allocated, allocator.peak_reserved) == (100 * MIB, 100 * MIB)
    allocator.reset_peaks()
    assert (allocator.peak_allocated, allocator.peak_reserved) == (30 * MIB, 30 * MIB)


def test_cached_segments_are_given_back_when_the_device_is_full() -> None:
    allocator = CachingAllocator(capacity=100 * MIB)
    allocator.free(allocator.allocate(60 * MIB))
    allocator.allocate(80 * MIB)
    assert (allocator.reserved, allocator.peak_reserved, allocator.retries) == (80 * MIB, 80 * MIB, 1)


def test_what_does_not_fit_is_an_error_that_tells_why() -> None:
    """A segment with one live block can't be given back: 35 MiB are free there and 20 outside, and yet 40 have no room."""
    allocator = CachingAllocator(capacity=80 * MIB)
    blocks = [allocator.allocate(size * MIB) for size in (9, 8, 9, 9, 8, 9)]  # two in each segment
    assert allocator.reserved == 60 * MIB
    for i in (0, 2, 5):
        allocator.free(blocks[i])
    with pytest.raises(OutOfDeviceMemory) as caught:
        allocator.allocate(40 * MIB)
    error = caught.value
    assert (error.requested, error.capacity) == (40 * MIB, 80 * MIB)
    assert (error.allocated, error.reserved, error.largest_free) == (25 * MIB, 60 * MIB, 12 * MIB)
    assert "no room for 40.00 MiB" in str(error)
    assert "12.00 MiB" in str(pickle.loads(pickle.dumps(error)))
    assert allocator.allocate(20 * MIB).size == 20 * MIB  # still usable


def test_another_streams_use_defers_the_reuse_of_a_block() -> None:
    allocator = CachingAllocator()
    block = allocator.allocate(30 * MIB)
    allocator.record_stream(block, 0)  # its own
    allocator.record_stream(block, 1)
    allocator.record_stream(block, 2)
    allocator.free(block)
    assert allocator.allocated == 0
    again = allocator.allocate(30 * MIB)
    assert allocator.reserved == 60 * MIB
    allocator.free(again)
    allocator.synchronize(1)
    assert allocator.allocate(30 * MIB).address == again.address
    allocator.synchronize(2)
    assert allocator.allocate(30 * MIB).address == block.address
    assert (allocator.allocated, allocator.reserved) == (60 * MIB, 60 * MIB)


def test_a_full_device_waits_for_other_streams() -> None:
    allocator = CachingAllocator(capacity=50 * MIB)
    block = allocator.allocate(30 * MIB)
    allocator.record_stream(block, 1)
    allocator.free(block)
    allocator.allocate(40 * MIB)
    assert (allocator.reserved, allocator.retries) == (40 * MIB, 1)


def test_large_blocks_are_not_split_with_max_split_size() -> None:
    """They serve requests of nearly their size, max_non_split_rounding_size = 20 MiB at most beyond it, and no smaller ones."""
    allocator = CachingAllocator(max_split_size=40 * MIB)
    allocator.free(allocator.allocate(60 * MIB))
    assert allocator.allocate(30 * MIB).size == 30 * MIB
    assert allocator.reserved == 90 * MIB
    assert allocator.allocate(40 * MIB).size == 40 * MIB  # 60 would be 20 more
    assert allocator.reserved == 130 * MIB
    assert allocator.allocate(42 * MIB).size == 60 * MIB
    assert (allocator.allocated, allocator.reserved) == (130 * MIB, 130 * MIB)


def test_with_max_split_size_only_as_much_as_needed_is_given_back() -> None:
    """As release_available_cached_blocks does: one segment that suffices, else the largest, and all only if they don't."""
    allocator = CachingAllocator(capacity=200 * MIB, max_split_size=40 * MIB)
    for block in [allocator.allocate(size * MIB) for size in (30, 50, 80)]:
        allocator.free(block)
    allocator.allocate(45 * MIB)  # fits the 50
    assert allocator.reserved == 160 * MIB
    allocator.allocate(44 * MIB)  # 80 is too wasteful, but is given back
    assert (allocator.reserved, allocator.retries) == (124 * MIB, 0)
    allocator = CachingAllocator(capacity=200 * MIB, max_split_size=40 * MIB)
    for block in [allocator.allocate(size * MIB) for size in (30, 50, 50, 60)]:
        allocator.free(block)
    allocator.allocate(100 * MIB)  # 60 and 50 are given back
    assert (allocator.reserved, allocator.retries) == (180 * MIB, 0)
    allocator.allocate(120 * MIB - 100 * MIB + 31 * MIB)  # 51: the other 50 isn't enough, so the 30 goes as well
    assert (allocator.reserved, allocator.retries) == (152 * MIB, 1)


def test_expandable_segments_grow_by_pages() -> None:
    """Of kSmallBuffer = 2 MiB in the small pool, large_segment_size = 20 MiB in the large one, and only by what is missing."""
    allocator = CachingAllocator(expandable_segments=True)
    allocator.allocate(512)
    assert allocator.reserved == 2 * MIB
    a = allocator.allocate(30 * MIB)
    assert (a.size, allocator.reserved) == (30 * MIB, 42 * MIB)
    b = allocator.allocate(25 * MIB)  # 10 MiB are there
    assert (b.address, allocator.reserved) == (a.address + 30 * MIB, 62 * MIB)
    allocator.free(a)
    allocator.free(b)
    assert allocator.allocate(60 * MIB).address == a.address
    assert allocator.reserved == 62 * MIB


def test_what_grows_is_used_last() -> None:
    """The free block at the end counts as large as it can grow (expandable_size), so a larger one is taken."""
    allocator = CachingAllocator(expandable_segments=True)
    a, _, c = (allocator.allocate(size * MIB) for size in (30, 20, 25))  # 80 reserved, 5 of them at the end
    allocator.free(a)
    assert allocator.allocate(4 * MIB).address == a.address
    assert allocator.allocate(28 * MIB).address == c.address + 25 * MIB


def test_expandable_segments_give_back_whole_pages_and_map_them_again() -> None:
    allocator = CachingAllocator(capacity=100 * MIB, expandable_segments=True)
    a, b, c = (allocator.allocate(size * MIB) for size in (30, 30, 30))
    assert allocator.reserved == 100 * MIB
    allocator.free(b)
    allocator.empty_cache()
    assert allocator.reserved == 80 * MIB  # 40 to 60; the others are in use in part
    assert allocator.allocate(10 * MIB).address == a.address + 30 * MIB  # what was left of b before the page
    assert allocator.allocate(20 * MIB).address == a.address + 40 * MIB  # the page
    assert allocator.reserved == 100 * MIB
    allocator.free(a)
    with pytest.raises(OutOfDeviceMemory) as caught:
        allocator.allocate(45 * MIB)
    assert (caught.value.allocated, caught.value.reserved, c.size) == (
        60 * MIB,
        80 * MIB,
        30 * MIB,
    )  # 0 to 20 was given back


def test_nothing_takes_nothing() -> None:
    allocator = CachingAllocator(capacity=0)
    block = allocator.allocate(0)
    allocator.record_stream(block, 1)
    allocator.free(block)
    assert (block.size, allocator.reserved) == (0, 0)


def test_a_block_is_freed_once_and_where_it_was_allocated() -> None:
    allocator, other = CachingAllocator(), CachingAllocator()
    block, foreign = allocator.allocate(100), other.allocate(100)
    with pytest.raises(ValueError, match="not allocated here"):
        allocator.free(foreign)
    allocator.free(block)
    again = allocator.allocate(100)
    assert again.address == block.address
    for wrong in (allocator.free, lambda block: allocator.record_stream(block, 1)):
        with pytest.raises(ValueError, match="not any more"):
            wrong(block)
    assert allocator.allocated == 512


@pytest.mark.parametrize(
    "make",
    [
        lambda: CachingAllocator(capacity=-1),
        lambda: CachingAllocator(max_split_size=19 * MIB),
        lambda: CachingAllocator(roundup_power2_divisions=3),
        lambda: CachingAllocator(roundup_power2_divisions=-4),
        lambda: CachingAllocator().allocate(-1),
    ],
)
def test_bad_numbers_are_errors(make: Callable[[], object]) -> None:
    with pytest.raises(ValueError, match=r"power of two|negative|the least"):
        make()


# The same once more as plain lists: a segment is a list of runs of bytes, each free, unmapped, or a number of an allocation.

FREE, UNMAPPED = -1, -2


class Reference:
    """The allocator by linear search, for one setting each of capacity, `max_split_size` and expandable segments."""

    def __init__(self, capacity: int, max_split: int | None, expandable: bool) -> None:
        self.capacity, self.max_split, self.expandable = capacity, max_split or 1 << 60, expandable
        self.pools: dict[tuple[bool, int], list[list[list[int]]]] = {}

    def runs(self) -> list[list[int]]:
        return [run for segments in self.pools.values() for segment in segments for run in segment]

    @property
    def reserved(self) -> int:
        return sum(size for size, state in self.runs() if state != UNMAPPED)

    @property
    def allocated(self) -> int:
        return sum(size for size, state in self.runs() if state >= 0)

    def merge(self) -> None:
        for segments in self.pools.values():
            for segment in segments:
                for i in reversed(range(1, len(segment))):
                    if segment[i][1] == segment[i - 1][1] < 0:
                        segment[i - 1][0] += segment.pop(i)[0]

    def allocate(self, number: int, nbytes: int, stream: int) -> bool:
        size = (nbytes + 511) // 512 * 512
        small = size <= MIB
        segments = self.pools.setdefault((small, stream), [])
        grow = self.map if self.expandable else self.segment
        if not (run := self.cached(segments, size)) and not (run := grow(segments, size, small)):
            if self.give_back_some(segments, size):
                run = grow(segments, size, small)
            if not run:
                self.empty_cache()
                run = grow(segments, size, small)
        if not run:
            return False
        rest = run[0] - size
        segment = next(s for s in segments if any(r is run for r in s))
        if rest >= 512 if small or self.expandable else rest > MIB and size < self.max_split:
            segment.insert([r is run for r in segment].index(True) + 1, [rest, FREE])
            run[0] = size
        run[1] = number
        return True

    def cached(self, segments: list[list[list[int]]], size: int) -> list[int] | None:
        found = sorted(
            (run[0], n, i)
            for n, s in enumerate(segments)
            for i, run in enumerate(s)
            if run[1] == FREE and run[0] >= size
        )
        if not found:
            return None

        def grown(at: tuple[int, int, int]) -> int:
            run = segments[at[1]][at[2] + 1 : at[2] + 2]
            return at[0] + (run[0][0] if run and run[0][1] == UNMAPPED else 0)

        i = 0
        while self.expandable and i + 1 < len(found) and grown(found[i + 1]) < grown(found[i]):
            i += 1
        if size < self.max_split <= found[i][0] or size >= self.max_split and found[i][0] >= size + 20 * MIB:
            return None
        return segments[found[i][1]][found[i][2]]

    def segment(self, segments: list[list[list[int]]], size: int, small: bool) -> list[int] | None:
        size = 2 * MIB if small else 20 * MIB if size < 10 * MIB else (size + 2 * MIB - 1) // (2 * MIB) * 2 * MIB
        if self.reserved + size > self.capacity:
            return None
        segments.append([[size, FREE]])
        return segments[-1][0]

    def map(self, segments: list[list[list[int]]], size: int, small: bool) -> list[int] | None:
        page = 2 * MIB if small else 20 * MIB
        places = [
            (n, max(0, i - (s[i - 1][1] == FREE)))
            for n, s in enumerate(segments)
            for i, run in enumerate(s)
            if run[1] == UNMAPPED
        ]
        for n, i in places:
            segment, there = segments[n], 0
            for run in segment[i:]:
                if run[1] >= 0:
                    break
                there += run[0]
            if there >= size:
                break
        else:
            segments.append([[(self.capacity * 9 // 8 + page - 1) // page * page, UNMAPPED]])
            segment, i = segments[-1], 0
        while segment[i][1] == UNMAPPED or segment[i][0] < size:
            at = i + (segment[i][1] == FREE)
            missing = size - (segment[i][0] if at > i else 0)
            pages = min((missing + page - 1) // page * page, segment[at][0])
            if self.reserved + pages > self.capacity:
                return None
            segment[at][0] -= pages
            segment.insert(at, [pages, FREE])
            if not segment[at + 1][0]:
                del segment[at + 1]
            self.merge()
        return segment[i]

    def give_back_some(self, segments: list[list[list[int]]], size: int) -> bool:
        if self.expandable or self.max_split == 1 << 60:
            return False
        wanted, given = max(size, self.max_split), 0
        whole = [s for s in segments if len(s) == 1 and s[0][1] == FREE and s[0][0] >= self.max_split]
        whole.sort(key=lambda s: s[0][0])
        enough = [s for s in whole if s[0][0] >= wanted]
        for segment in enough[:1] or reversed(whole):
            if given < wanted:
                given += segment[0][0]
                segments[:] = [s for s in segments if s is not segment]
        return given >= wanted

    def free(self, number: int) -> None:
        next(run for run in self.runs() if run[1] == number)[1] = FREE
        self.merge()

    def empty_cache(self) -> None:
        for (small, _), segments in self.pools.items():
            if not self.expandable:
                segments[:] = [s for s in segments if len(s) > 1 or s[0][1] >= 0]
                continue
            page = 2 * MIB if small else 20 * MIB
            for segment in segments:
                cut, at = [], 0
                for size, state in segment:
                    first, last = (at + page - 1) // page * page, (at + size) // page * page
                    if state == FREE and first < last:
                        cut += [[first - at, FREE], [last - first, UNMAPPED], [at + size - last, FREE]]
                    else:
                        cut.append([size, state])
                    at += size
                segment[:] = [run for run in cut if run[0]]
        self.merge()


sizes = st.one_of(
    st.integers(1, 4 * KIB),
    st.integers(1, 8).map(lambda n: n * 256 * KIB),
    st.integers(1, 80).map(lambda n: n * MIB),
    st.integers(MIB, 12 * MIB),
)
# An allocation of some bytes on a stream, a free of one of those that are live, or None for an empty cache.
events = st.lists(st.one_of(st.tuples(sizes, st.integers(0, 1)), st.integers(0, 50), st.none()), max_size=40)
settings = st.tuples(
    st.integers(20, 200).map(lambda n: n * MIB), st.sampled_from([None, 20 * MIB, 40 * MIB]), st.booleans()
)


def hold(capacity: int, max_split: int | None, expandable: bool, events: list[tuple[int, int] | int | None]) -> None:
    """Assert after each event that the allocator has what the reference has, and the invariants of any allocator."""
    allocator = CachingAllocator(capacity, max_split_size=max_split, expandable_segments=expandable)
    reference = Reference(capacity, max_split, expandable)
    live: dict[int, Block] = {}
    peaks = [0, 0]
    for number, event in enumerate(events):
        if isinstance(event, tuple):
            try:
                live[number] = allocator.allocate(*event)
                fits = True
            except OutOfDeviceMemory:
                fits = False
            assert fits == reference.allocate(number, *event)
        elif event is None:
            allocator.empty_cache()
            reference.empty_cache()
        elif live:
            freed = sorted(live)[event % len(live)]
            allocator.free(live.pop(freed))
            reference.free(freed)
        assert (allocator.allocated, allocator.reserved) == (reference.allocated, reference.reserved)
        assert {n: b.size for n, b in live.items()} == {n: size for size, n in reference.runs() if n >= 0}
        assert sum(b.requested for b in live.values()) <= allocator.allocated <= allocator.reserved <= capacity
        peaks = [max(peaks[0], allocator.allocated), max(peaks[1], allocator.reserved)]
        placed = sorted((b.address, b.address + b.size) for b in live.values())
        assert all(end <= start for (_, end), (start, _) in zip(placed, placed[1:], strict=False))
    assert allocator.peak_allocated == peaks[0]
    assert allocator.peak_reserved >= peaks[1]  # while pages were mapped for a request that failed, it was more
    for block in live.values():
        allocator.free(block)
    allocator.empty_cache()
    assert (allocator.allocated, allocator.reserved) == (0, 0)


@quick(15)
@given(settings, events)
def test_every_trace_takes_what_the_reference_takes(settings, events):
    hold(*settings, events)


@many(3000)
@given(settings, events)
def test_many_traces_take_what_the_reference_takes(settings, events):
    hold(*settings, events)


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
