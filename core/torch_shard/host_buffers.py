"""Host memory for copies of what is on the device: buffers that are used again, in the same pattern step after step.

torch's allocator of pinned memory rounds each request up to a power of two, and a request that finds nothing to use again
waits for the driver. So buffers are cut from slabs whose sizes waste little of such a power of two, and go back to a pool.
"""

from __future__ import annotations

from collections import deque
from typing import Any

import torch
import torch.distributed as dist

from .errors import UnavailableError

__all__ = ["HostBuffer", "HostBuffers"]

_ALIGNMENT = 512  # bytes
_CLASSES = 8  # sizes of buffers between a power of two and the next: at most an eighth of a buffer is not used
_PER_SLAB = 8  # buffers, at most
_WASTE = 1.125  # a slab that is rounded up by no more than this is good enough


class _Slab:
    """One allocation, cut into buffers of one size."""

    __slots__ = ("memory", "out", "size", "used")

    def __init__(self, memory: torch.Tensor, size: int) -> None:
        self.memory, self.size = memory, size
        self.out = 0  # buffers in use
        self.used = 0  # when one of them was last taken


class HostBuffer:
    """A part of a slab, in use.

    Attributes:
        memory: 1-D, uint8, at least as many bytes as were asked for.
        event: CUDA: behind the last copy from or to it. Who copies to it has that stream wait for this one first.
    """

    __slots__ = ("event", "memory", "slab")

    def __init__(self, memory: torch.Tensor, slab: _Slab) -> None:
        self.memory, self.slab = memory, slab
        self.event: Any = None


class HostBuffers:
    """A pool of them. Not collective.

    Args:
        pinned: whether the memory is page-locked, as copies to and from a GPU that nobody waits for need it.

    Attributes:
        held: bytes of all slabs. At most twice what has been in use at once, but for what rounding adds: where sizes change from
            step to step, slabs that nobody uses are given back before new ones are made.
        in_use: bytes of the buffers that are out, rounded as they were given.
    """

    def __init__(self, pinned: bool) -> None:
        self.pinned = pinned
        self.held = self.in_use = self._peak = self._clock = 0
        self._free: dict[int, list[HostBuffer]] = {}
        self._slabs: list[_Slab] = []
        # Buffers come back from finalizers, which may run anywhere, in the middle of `take` too: they only append here.
        self._returned: deque[HostBuffer] = deque()

    def take(self, nbytes: int) -> HostBuffer:
        """A buffer of at least `nbytes` bytes.

        Raises:
            UnavailableError: there is no such memory; nothing has changed.
        """
        self._collect()
        size = _size_class(nbytes)
        free = self._free.setdefault(size, [])
        if not free:
            free.extend(self._cut(size))
        buffer = free.pop()
        self._clock += 1
        buffer.slab.out += 1
        buffer.slab.used = self._clock
        self.in_use += size
        self._peak = max(self._peak, self.in_use)
        return buffer

    def give(self, buffer: HostBuffer) -> None:
        """Back, whatever copies from or to it are still under way: ``buffer.event`` is behind the last one."""
        self._returned.append(buffer)

    def collect(self) -> None:
        """Bring :attr:`in_use` up to date."""
        self._collect()

    def _collect(self) -> None:
        while self._returned:
            buffer = self._returned.popleft()
            slab = buffer.slab
            slab.out -= 1
            self.in_use -= slab.size
            # Last in, first out: backward gives them back in reverse, so that the next forward takes each where it did before.
            self._free[slab.size].append(buffer)

    def _cut(self, size: int) -> list[HostBuffer]:
        count = _count(size)
        self._give_back(count * size, max(self._peak, self.in_use + size))
        try:
            memory = torch.empty(count * size, dtype=torch.uint8, device="cpu", pin_memory=self.pinned)
        except RuntimeError as error:
            rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
            raise UnavailableError(
                f"rank {rank}: activation_offload: {count * size} bytes of {'pinned ' * self.pinned}host memory can't be had, "
                f"beside {self.held} that are held for it ({error}). Offload fewer layers, or take smaller batches, or run "
                "fewer ranks on this machine."
            ) from error
        slab = _Slab(memory, size)
        self._slabs.append(slab)
        self.held += count * size
        return [HostBuffer(memory[i * size : (i + 1) * size], slab) for i in reversed(range(count))]

    def _give_back(self, wanted: int, peak: int) -> None:
        """Slabs that nobody uses, as long as there would be too much otherwise."""
        for slab in sorted((s for s in self._slabs if not s.out), key=lambda s: s.used):
            if self.held + wanted <= 2 * peak:
                return
            self._free[slab.size] = [buffer for buffer in self._free[slab.size] if buffer.slab is not slab]
            self._slabs.remove(slab)
            self.held -= slab.memory.numel()
            # Copies under way: torch's allocator of pinned memory keeps it until they are through.


def _size_class(nbytes: int) -> int:
    step = max(_ALIGNMENT, (1 << nbytes.bit_length()) // (2 * _CLASSES))
    return -(-nbytes // step) * step


def _count(size: int) -> int:
    """How many buffers of `size` bytes to cut from one slab, which takes a power of two of bytes."""
    waste = {n: (1 << (n * size - 1).bit_length()) / (n * size) for n in range(1, _PER_SLAB + 1)}
    return next((n for n in waste if waste[n] <= _WASTE), min(waste, key=lambda n: waste[n]))
