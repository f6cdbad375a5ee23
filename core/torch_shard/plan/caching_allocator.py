"""A model of torch's allocator for CUDA devices: from a trace of allocations and frees, the bytes it would take from a device.

A tensor takes more than its bytes. The allocator rounds sizes up, takes memory from the device in segments, keeps what is
freed, and a freed block serves only requests of its stream and kind that fit in it. Whether a step fits a device is decided
by the segments (*reserved*), not by the tensors (*allocated*), and the difference, fragmentation, depends on the order of all
requests. Here the allocator's rules are followed block by block, so that a peak can be predicted without a device.

The rules and constants are those of c10/cuda/CUDACachingAllocator.cpp and c10/core/AllocatorConfig.h in torch 2.13. Comments
name the function there whose rule they follow. Where the driver places segments can't be known: here a later segment has a
higher address, which matters only between free blocks of equal size. Not modelled are private pools (CUDA graphs, MemPool),
`garbage_collection_threshold`, other values of `large_segment_size_mb`, and memory that never passes through the allocator:
the CUDA context, and buffers of NCCL.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass, field

__all__ = ["Block", "CachingAllocator", "OutOfDeviceMemory"]

MIN_BLOCK_SIZE = 512  # kMinBlockSize: all sizes are multiples of it
SMALL_SIZE = 1 << 20  # kSmallSize: the largest request of the small pool
SMALL_BUFFER = 2 << 20  # kSmallBuffer: a segment, or a page, of the small pool
MIN_LARGE_ALLOC = 10 << 20  # kMinLargeAlloc: a request from here on gets a segment of its own size
LARGE_BUFFER = 20 << 20  # large_segment_size: the segment of a smaller request, a page, and max_non_split_rounding_size
ROUND_LARGE = 2 << 20  # kRoundLarge: to which segments of their own size are rounded up

_UNLIMITED = 1 << 50  # bytes; beyond any device, and few enough for many address ranges of that size
# A free block is known by one integer, its size above its address, so that integers sort as (size, address) do. Comparing
# these is several times as fast as comparing tuples.
_ADDRESS_BITS = 64
_ADDRESS = (1 << _ADDRESS_BITS) - 1


class OutOfDeviceMemory(RuntimeError):
    """A request does not fit the device, not even after all that is cached was given back; as `torch.OutOfMemoryError`.

    The allocator stays usable, and what it had cached has been given back to the device, as in torch.

    Attributes:
        requested: the bytes that were asked for.
        allocated: the bytes of live blocks, without this request.
        reserved: the bytes of all segments, after what could be given back was.
        largest_free: the bytes of the largest free block in those segments, of whichever stream; it was too small, or of
            another stream or pool.
        capacity: the bytes that the allocator may reserve.
    """

    def __init__(self, requested: int, allocated: int, reserved: int, largest_free: int, capacity: int) -> None:
        # All of them are `args`, or else the error could not be unpickled.
        super().__init__(requested, allocated, reserved, largest_free, capacity)
        self.requested = requested
        self.allocated = allocated
        self.reserved = reserved
        self.largest_free = largest_free
        self.capacity = capacity

    def __str__(self) -> str:
        return (
            f"no room for {_mib(self.requested)}: of {_mib(self.capacity)} on the device, {_mib(self.reserved)} are reserved, "
            f"{_mib(self.allocated)} of these allocated, and the largest free block has {_mib(self.largest_free)}"
        )


@dataclass(eq=False, slots=True)
class _Pool:
    """The free blocks of one stream in one of the two pools, which no other stream and pool may use."""

    stream: int
    small: bool
    page: int  # bytes by which an expandable segment grows
    min_remainder: int  # of a block that is split, in bytes
    keys: list[int] = field(default_factory=list)  # of the free blocks, sorted
    unmapped: dict[int, int] = field(default_factory=dict)  # of expandable segments, where no memory is: start -> end


@dataclass(eq=False, slots=True)
class Block:
    """Memory that was allocated and not freed yet.

    Attributes:
        address: where it begins, in an address space of the allocator's own.
        size: its bytes, rounding included, which count as allocated. In the large pool this may be up to 1 MiB more than the
            rounded request, because so small a remainder isn't split off.
        requested: the bytes that were asked for.
    """

    address: int
    size: int
    requested: int
    _pool: _Pool
    _uses: set[int] | None = None  # other streams that may still read it

    @property
    def stream(self) -> int:
        """The stream that the block was allocated on."""
        return self._pool.stream


class CachingAllocator:
    """The allocator of one device. It takes no memory itself.

    A call takes O(log n) comparisons for n free blocks of the stream, and a few microseconds.

    Attributes:
        allocated: the bytes of live blocks, as `torch.cuda.memory_allocated()`.
        reserved: the bytes of segments, as `torch.cuda.memory_reserved()`.
        peak_allocated: the most bytes allocated at one time, as `torch.cuda.max_memory_allocated()`.
        peak_reserved: the most bytes reserved at one time, as `torch.cuda.max_memory_reserved()`.
        retries: how often the device was full and all cached segments were given back, which stalls it; as
            `num_alloc_retries` of `torch.cuda.memory_stats()`.
    """

    def __init__(
        self,
        capacity: int | None = None,
        *,
        max_split_size: int | None = None,
        roundup_power2_divisions: int = 0,
        expandable_segments: bool = False,
    ) -> None:
        """Make an allocator that has reserved nothing.

        Args:
            capacity: the bytes that it may reserve: the device's memory less what others have taken. None is no limit.
            max_split_size: from this many bytes on, a block isn't split, and serves requests of nearly its size only. As
                `max_split_size_mb` in PYTORCH_ALLOC_CONF, but in bytes. None is no limit.
            roundup_power2_divisions: round sizes up to a power of two or one of this many equal steps up to the next. As in
                PYTORCH_ALLOC_CONF, with one number for all sizes. 0 and 1 round to 512 bytes only.
            expandable_segments: let one segment per stream and pool grow by pages, instead of taking many. As in
                PYTORCH_ALLOC_CONF.

        Raises:
            ValueError: a setting that torch refuses as well: `max_split_size` below 20 MiB, or divisions that are no power
                of two; or a negative capacity.
        """
        if capacity is not None and capacity < 0:
            raise ValueError(f"capacity: {capacity} bytes are negative")
        if max_split_size is not None and max_split_size < LARGE_BUFFER:
            raise ValueError(f"max_split_size: {max_split_size} bytes are fewer than {LARGE_BUFFER}, the least")
        if roundup_power2_divisions < 0 or roundup_power2_divisions & (roundup_power2_divisions - 1):
            raise ValueError(f"roundup_power2_divisions: {roundup_power2_divisions} is no power of two")
        self.allocated = self.reserved = self.peak_allocated = self.peak_reserved = self.retries = 0
        self._capacity = _UNLIMITED if capacity is None else capacity
        self._max_split = _UNLIMITED if max_split_size is None else max_split_size
        self._divisions = roundup_power2_divisions
        self._expandable = expandable_segments
        self._pools: tuple[dict[int, _Pool], dict[int, _Pool]] = ({}, {})  # large and small ones, by stream
        self._live: dict[int, Block] = {}  # by address
        # Free blocks of all pools, by where they begin and end: address -> size. Segments never touch, so what a freed block
        # finds there is of its own segment.
        self._starts: dict[int, int] = {}
        self._ends: dict[int, int] = {}
        self._segments: dict[int, int] = {}  # address -> size, except for expandable ones
        self._unclaimed = LARGE_BUFFER  # the lowest address beyond all segments
        self._waiting: dict[int, list[Block]] = {}  # freed, but still in use: by the streams that use them

    def allocate(self, nbytes: int, stream: int = 0) -> Block:
        """Allocate `nbytes` bytes on a stream, as the allocator's `malloc` does.

        A request of 0 bytes takes nothing; torch gives it no pointer.

        Raises:
            OutOfDeviceMemory: the device has no room. Nothing was allocated.
            ValueError: `nbytes` is negative.
        """
        size = self.rounded(nbytes)
        small = size <= SMALL_SIZE
        pool = self._pools[small].get(stream) or self._new_pool(small, stream)
        if not nbytes:
            return Block(0, 0, 0, pool)
        key = self._cached(pool, size) or self._new(pool, size)
        if not key:
            largest = max((p.keys[-1] for pools in self._pools for p in pools.values() if p.keys), default=0)
            raise OutOfDeviceMemory(nbytes, self.allocated, self.reserved, largest >> _ADDRESS_BITS, self._capacity)
        found, address = key >> _ADDRESS_BITS, key & _ADDRESS
        # should_split: the remainder becomes a free block, unless it is too small to be of use.
        if found - size >= pool.min_remainder and (size < self._max_split or self._expandable):
            self._insert(pool, address + size, found - size)
            found = size
        block = self._live[address] = Block(address, found, nbytes, pool)
        self.allocated += found
        if self.allocated > self.peak_allocated:
            self.peak_allocated = self.allocated
        return block

    def free(self, block: Block) -> None:
        """Free a block. Its memory stays reserved, and merges with free memory on both sides.

        A block that other streams use is no longer allocated, but can't be reused before `synchronize`.

        Raises:
            ValueError: the block is no live block of this allocator, such as one that was freed before.
        """
        address = block.address
        if self._live.get(address) is not block:
            if block.size:
                raise _not_live(block)
            return
        del self._live[address]
        self.allocated -= block.size
        if block._uses:
            for stream in block._uses:
                self._waiting.setdefault(stream, []).append(block)
        else:
            self._merge(block._pool, address, block.size)

    def record_stream(self, block: Block, stream: int) -> None:
        """Note that another stream uses a block, as `torch.Tensor.record_stream` does.

        Raises:
            ValueError: the block is no live block of this allocator.
        """
        if block.size and self._live.get(block.address) is not block:
            raise _not_live(block)
        if stream != block.stream:
            block._uses = (block._uses or set()) | {stream}

    def synchronize(self, stream: int | None = None) -> None:
        """Say that a stream, or every stream if None, has done all work up to here: what was freed before can be reused.

        In torch the device's own progress decides this, asked for at every allocation (`process_events`). A trace has to say
        it, because it isn't known without a device.
        """
        for done in list(self._waiting) if stream is None else [stream]:
            for block in self._waiting.pop(done, ()):
                assert block._uses is not None
                block._uses.discard(done)
                if not block._uses:
                    self._merge(block._pool, block.address, block.size)

    def empty_cache(self) -> None:
        """Give segments without any live block back to the device, and whole pages of expandable ones; it synchronizes."""
        self.synchronize()
        for pools in self._pools:
            for pool in pools.values():
                for key in list(pool.keys):
                    if self._expandable:
                        self._unmap(pool, key)
                    elif self._segments.get(key & _ADDRESS) == key >> _ADDRESS_BITS:
                        self._release(pool, key)

    def reset_peaks(self) -> None:
        """Let peaks begin anew from the present bytes, as `torch.cuda.reset_peak_memory_stats` does."""
        self.peak_allocated, self.peak_reserved = self.allocated, self.reserved

    def rounded(self, nbytes: int) -> int:
        """Return the bytes of a block for a request (`round_size`).

        Raises:
            ValueError: `nbytes` is negative.
        """
        if nbytes <= MIN_BLOCK_SIZE:
            if nbytes < 0:
                raise ValueError(f"{nbytes} bytes are negative")
            return MIN_BLOCK_SIZE
        step = MIN_BLOCK_SIZE
        if self._divisions > 1 and nbytes > MIN_BLOCK_SIZE * self._divisions:
            step = (1 << (nbytes.bit_length() - 1)) // self._divisions
        return -(-nbytes // step) * step

    def _new_pool(self, small: bool, stream: int) -> _Pool:
        # should_split: in the large pool the remainder must be larger than kSmallSize.
        least = MIN_BLOCK_SIZE if small or self._expandable else SMALL_SIZE + MIN_BLOCK_SIZE
        pool = self._pools[small][stream] = _Pool(stream, small, SMALL_BUFFER if small else LARGE_BUFFER, least)
        return pool

    def _cached(self, pool: _Pool, size: int) -> int | None:
        """Take the smallest free block that fits, of equal ones that with the lowest address (`get_free_block`)."""
        keys = pool.keys
        i = bisect_left(keys, size << _ADDRESS_BITS)
        if i == len(keys):
            return None
        key = keys[i]
        end = (key & _ADDRESS) + (key >> _ADDRESS_BITS)
        if end in pool.unmapped:
            # A block that can grow counts as large as it can become, so that others are used up first.
            while i + 1 < len(keys) and _grown(pool, keys[i + 1]) < _grown(pool, keys[i]):
                i += 1
            key = keys[i]
            end = (key & _ADDRESS) + (key >> _ADDRESS_BITS)
        # A block from max_split_size on can't be split: it serves no smaller requests, and no others that would waste much.
        found = key >> _ADDRESS_BITS
        if found >= self._max_split and (size < self._max_split or found >= size + LARGE_BUFFER):
            return None
        del keys[i], self._starts[key & _ADDRESS], self._ends[end]
        return key

    def _new(self, pool: _Pool, size: int) -> int | None:
        """Take a block of new memory, for which cached segments are given back if need be, in the order of `malloc`."""
        grow = self._map if self._expandable else self._new_segment
        key = grow(pool, size)
        if key is None and self._release_oversize(pool, size):
            key = grow(pool, size)
        if key is None:
            self.retries += 1
            self.empty_cache()
            # Blocks that this has merged aren't searched again, neither here nor in torch.
            key = grow(pool, size)
        return key

    def _new_segment(self, pool: _Pool, size: int) -> int | None:
        """Take a segment from the device (`get_allocation_size`, `alloc_block`)."""
        if pool.small:
            size = SMALL_BUFFER
        elif size < MIN_LARGE_ALLOC:
            size = LARGE_BUFFER
        else:
            size = -(-size // ROUND_LARGE) * ROUND_LARGE
        if not self._reserve(size):
            return None
        address = self._address_space(size)
        self._segments[address] = size
        return size << _ADDRESS_BITS | address

    def _reserve(self, nbytes: int) -> bool:
        if self.reserved + nbytes > self._capacity:
            return False
        self.reserved += nbytes
        self.peak_reserved = max(self.peak_reserved, self.reserved)
        return True

    def _address_space(self, nbytes: int) -> int:
        # Multiples of the largest page, with a gap, so that blocks of different segments are never neighbours.
        address = self._unclaimed
        self._unclaimed += (nbytes // LARGE_BUFFER + 2) * LARGE_BUFFER
        return address

    def _merge(self, pool: _Pool, address: int, size: int) -> None:
        """Make a free block, merged with the free blocks on both sides (`free_block`, `try_merge_blocks`)."""
        keys, starts, ends = pool.keys, self._starts, self._ends
        end = address + size
        if address in ends:
            before = ends.pop(address)
            address -= before
            del keys[bisect_left(keys, before << _ADDRESS_BITS | address)]
        if end in starts:
            after = starts.pop(end)
            del keys[bisect_left(keys, after << _ADDRESS_BITS | end)]
            end += after
        # What began here or ended there, if it was free, gets its new size.
        starts[address] = ends[end] = size = end - address
        insort(keys, size << _ADDRESS_BITS | address)

    def _insert(self, pool: _Pool, address: int, size: int) -> None:
        insort(pool.keys, size << _ADDRESS_BITS | address)
        self._starts[address] = self._ends[address + size] = size

    def _remove(self, pool: _Pool, address: int, size: int) -> int:
        key = size << _ADDRESS_BITS | address
        del pool.keys[bisect_left(pool.keys, key)]
        del self._starts[address], self._ends[address + size]
        return key

    def _release(self, pool: _Pool, key: int) -> None:
        """Give a segment back that is one free block (`release_block`)."""
        size, address = key >> _ADDRESS_BITS, key & _ADDRESS
        self._remove(pool, address, size)
        del self._segments[address]
        self.reserved -= size

    def _release_oversize(self, pool: _Pool, size: int) -> bool:
        """Give back a segment that is too large to be split but large enough for the request, or else the largest ones until
        there is enough, and return whether there is (`release_available_cached_blocks`).
        """
        if self._expandable or self._max_split == _UNLIMITED:
            return False
        wanted = max(size, self._max_split)
        i = bisect_left(pool.keys, wanted << _ADDRESS_BITS)
        if i < len(pool.keys):
            self._release(pool, pool.keys[i])
            return True
        released = 0
        while released < wanted and pool.keys and pool.keys[-1] >> _ADDRESS_BITS >= self._max_split:
            released += pool.keys[-1] >> _ADDRESS_BITS
            self._release(pool, pool.keys[-1])
        return released >= wanted

    # Expandable segments. A segment is a range of addresses larger than the device's memory, of which some pages are mapped.

    def _map(self, pool: _Pool, size: int) -> int | None:
        """Map pages beside free memory until a block fits the request (`try_allocate_expandable_block`, `map_block`).

        What could be mapped before the device was full stays there as free memory.
        """
        address = self._room(pool, size)
        while (found := self._starts.get(address, 0)) < size:
            start = address + found
            end = pool.unmapped[start]
            mapped = min(-(-(size - found) // pool.page) * pool.page, end - start)
            if not self._reserve(mapped):
                return None
            del pool.unmapped[start]
            if start + mapped < end:
                pool.unmapped[start + mapped] = end
            self._merge(pool, start, mapped)
        return self._remove(pool, address, found)

    def _room(self, pool: _Pool, size: int) -> int:
        """Return the lowest address from which on free and unmapped memory fit a request (`find_expandable_block`)."""
        for start in sorted(pool.unmapped):
            address = end = start - self._ends.get(start, 0)
            while end - address < size:
                step = self._starts.get(end) or pool.unmapped.get(end, end) - end
                if not step:
                    break
                end += step
            else:
                return address
        # ExpandableSegment: 1 1/8 of the device, for pages that can't be used at the addresses where they were unmapped.
        span = -(-(self._capacity + self._capacity // 8) // pool.page) * pool.page
        address = self._address_space(span)
        pool.unmapped[address] = address + span
        return address

    def _unmap(self, pool: _Pool, key: int) -> None:
        """Give the whole pages of a free block back to the device (`unmap_block`)."""
        size, address = key >> _ADDRESS_BITS, key & _ADDRESS
        first, last = -(-address // pool.page) * pool.page, (address + size) // pool.page * pool.page
        if first >= last:
            return
        self._remove(pool, address, size)
        if address < first:
            self._insert(pool, address, first - address)
        if last < address + size:
            self._insert(pool, last, address + size - last)
        self.reserved -= last - first
        begin = next((start for start, end in pool.unmapped.items() if end == first), first)
        pool.unmapped[begin] = pool.unmapped.pop(last, last)


def _grown(pool: _Pool, key: int) -> int:
    """Return how large a free block is with the unmapped memory behind it."""
    size = key >> _ADDRESS_BITS
    end = (key & _ADDRESS) + size
    return size + pool.unmapped.get(end, end) - end


def _not_live(block: Block) -> ValueError:
    return ValueError(
        f"the block of {block.requested} bytes at {block.address:#x} is not allocated here, or not any more"
    )


def _mib(nbytes: int) -> str:
    return f"{nbytes / 2**20:,.2f} MiB"
