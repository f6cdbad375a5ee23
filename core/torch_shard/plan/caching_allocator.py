"""A model of torch's allocator for CUDA devices: from a trace of allocations and frees, the bytes it would take from a device.

A tensor takes more than its bytes. The allocator rounds sizes up, takes memory from the device in segments, keeps what is
freed, and a freed block serves only requests of its stream and kind that fit in it. Whether a step fits a device is decided
by the segments (*reserved*), not by the tensors (*allocated*), and the difference, fragmentation, depends on the order of all
requests. Here the allocator's rules are followed block by block, so that a peak can be predicted without a device.

The rules and constants are those of c10/cuda/CUDACachingAllocator.cpp and c10/core/AllocatorConfig.h in torch 2.13, with the
default settings, as long as the device is not full. Comments name the function there whose rule they follow. Where the driver
places segments can't be known: here a later segment has a higher address, which matters only between free blocks of equal size.
Not modelled are other settings (PYTORCH_ALLOC_CONF), what a full device gives back, `record_stream`, which the engine does not
use for its buffers, private pools (CUDA graphs, MemPool), and memory that never passes through the allocator: the CUDA context,
and buffers of NCCL.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

MIN_BLOCK_SIZE = 512  # kMinBlockSize: all sizes are multiples of it
SMALL_SIZE = 1 << 20  # kSmallSize: the largest request of the small pool
SMALL_BUFFER = 2 << 20  # kSmallBuffer: a segment of the small pool
MIN_LARGE_ALLOC = 10 << 20  # kMinLargeAlloc: a request from here on gets a segment of its own size
LARGE_BUFFER = 20 << 20  # large_segment_size: the segment of a smaller request
ROUND_LARGE = 2 << 20  # kRoundLarge: to which segments of their own size are rounded up

# A free block is known by one integer, its size above its address, so that integers sort as (size, address) do. Comparing
# these is several times as fast as comparing tuples.
_ADDRESS_BITS = 64
_ADDRESS = (1 << _ADDRESS_BITS) - 1


@dataclass(eq=False, slots=True)
class Block:
    """Memory that was allocated and not freed yet.

    Attributes:
        address: the beginning of the block, in an address space of the allocator's own.
        size: its bytes, rounding included, which count as allocated. In the large pool this may be up to 1 MiB more than the
            rounded request, because so small a remainder isn't split off.
    """

    address: int
    size: int
    _free: list[int]  # the free blocks of its pool


class CachingAllocator:
    """The allocator of one device. It takes no memory itself.

    A call takes O(log n) comparisons for n free blocks of the stream, and a few microseconds.

    Attributes:
        allocated: the bytes of live blocks, as `torch.cuda.memory_allocated()`.
        reserved: the bytes of segments, as `torch.cuda.memory_reserved()`. They only grow.
        peak_allocated: the most bytes allocated at one time, as `torch.cuda.max_memory_allocated()`.
    """

    def __init__(self) -> None:
        self.allocated = self.reserved = self.peak_allocated = 0
        # The free blocks of one stream in one of the two pools, sorted, which no other stream and pool may use.
        self._pools: dict[tuple[int, bool], list[int]] = {}
        # Free blocks of all pools, by where they begin and end: address -> size. Segments never touch, so what a freed block
        # finds there is of its own segment.
        self._starts: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        self._unclaimed = 0  # the lowest address beyond all segments

    def allocate(self, nbytes: int, stream: int = 0) -> Block:
        """Allocate `nbytes` bytes on a stream, as the allocator's `malloc` does.

        A request of 0 bytes takes nothing; torch gives it no pointer.
        """
        size = max(1, -(-nbytes // MIN_BLOCK_SIZE)) * MIN_BLOCK_SIZE  # round_size
        small = size <= SMALL_SIZE
        free = self._pools.setdefault((stream, small), [])
        if not nbytes:
            return Block(0, 0, free)
        found, address = self._cached(free, size) or self._new_segment(size, small)
        # should_split: the remainder becomes a free block, unless it is too small to be of use.
        if found - size >= (MIN_BLOCK_SIZE if small else SMALL_SIZE + MIN_BLOCK_SIZE):
            self._insert(free, address + size, found - size)
            found = size
        self.allocated += found
        self.peak_allocated = max(self.peak_allocated, self.allocated)
        return Block(address, found, free)

    def free(self, block: Block) -> None:
        """Free a block. Its memory stays reserved, and merges with free memory on both sides (`try_merge_blocks`)."""
        if not block.size:
            return
        self.allocated -= block.size
        begin, end, free = block.address, block.address + block.size, block._free
        if begin in self._ends:
            begin -= self._ends[begin]
            self._remove(free, begin, self._starts[begin])
        if end in self._starts:
            after = self._starts[end]
            self._remove(free, end, after)
            end += after
        self._insert(free, begin, end - begin)

    def _cached(self, free: list[int], size: int) -> tuple[int, int] | None:
        """Take the smallest free block that fits, of equal ones that with the lowest address (`get_free_block`)."""
        i = bisect_left(free, size << _ADDRESS_BITS)
        if i == len(free):
            return None
        found, address = free[i] >> _ADDRESS_BITS, free[i] & _ADDRESS
        self._remove(free, address, found)
        return found, address

    def _new_segment(self, size: int, small: bool) -> tuple[int, int]:
        """Take a segment from the device; return its size and address (`get_allocation_size`, `alloc_block`)."""
        if small:
            size = SMALL_BUFFER
        elif size < MIN_LARGE_ALLOC:
            size = LARGE_BUFFER
        else:
            size = -(-size // ROUND_LARGE) * ROUND_LARGE
        self.reserved += size
        address = self._unclaimed
        self._unclaimed += size + MIN_BLOCK_SIZE  # a gap, so that blocks of different segments are never neighbours
        return size, address

    def _insert(self, free: list[int], address: int, size: int) -> None:
        insort(free, size << _ADDRESS_BITS | address)
        self._starts[address] = self._ends[address + size] = size

    def _remove(self, free: list[int], address: int, size: int) -> None:
        del free[bisect_left(free, size << _ADDRESS_BITS | address)]
        del self._starts[address], self._ends[address + size]
