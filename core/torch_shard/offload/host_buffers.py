"""A pool of host memory for copies of activations: buffers are used again, in the same pattern step after step."""

from __future__ import annotations

from collections import defaultdict, deque
from dataclasses import dataclass
from typing import Any

import torch

from ..errors import HostMemoryError
from ..log import current_rank
from .memory_limits import available, formatted
from .pinned import allocate, can_pin

_PAGE = 4096  # bytes
_CLASSES = 8  # sizes of buffers between a power of two and the next: at most an eighth of what is asked for is added


@dataclass(eq=False)
class HostBuffer:
    """A piece of host memory.

    Attributes:
        memory: 1-D, uint8, at least as many bytes as were asked for.
        event: the CUDA event after the last copy from or to the memory. A stream that copies to the memory waits for it first.
    """

    memory: torch.Tensor
    event: Any = None


class HostBuffers:
    """A pool of host memory for copies to and from one device. Not collective.

    Memory is page-locked where copies to and from `device` need that. To allocate it takes long, and to give it back waits for
    the device, so it is kept for the next step.

    Attributes:
        held: bytes of all buffers, at most twice what has been in use at once: where sizes change from step to step, unused
            buffers are given back before others are made.
        in_use: bytes of those that are out, as of the last :meth:`take` or :meth:`collect`.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.held = self.in_use = self._peak = 0
        self._free: defaultdict[int, list[HostBuffer]] = defaultdict(list)
        # Buffers come back from finalizers, which may run anywhere, in the middle of `take` too: they only append here.
        self._returned: deque[HostBuffer] = deque()

    def take(self, nbytes: int) -> HostBuffer:
        """Return a buffer of at least `nbytes` bytes.

        Raises:
            HostMemoryError: there is no such memory. Nothing has changed, but for unused buffers that were given back.
        """
        self.collect()
        size = _size_class(nbytes)
        free = self._free[size]
        buffer = free.pop() if free else self._made(size)
        self.in_use += size
        self._peak = max(self._peak, self.in_use)
        return buffer

    def give(self, buffer: HostBuffer) -> None:
        """Take a buffer back. Copies from or to it may still be under way: ``buffer.event`` comes after the last one."""
        self._returned.append(buffer)

    def collect(self) -> None:
        """Make the buffers that were given back available to :meth:`take`."""
        while self._returned:
            buffer = self._returned.popleft()
            size = buffer.memory.numel()
            self.in_use -= size
            # Last in, first out: backward gives them back in reverse, so that the next forward takes each where it did before.
            self._free[size].append(buffer)

    def _made(self, size: int) -> HostBuffer:
        if self.held + size > 2 * max(self._peak, self.in_use + size):  # sizes have changed
            # Copies may be under way: `allocate` has the memory's end wait for the device.
            self._free.clear()
            self.held = self.in_use
        room = available()
        if room is not None and room < size:  # the system would give it, and end a process when it is written to
            raise HostMemoryError(self._message(size, f"{formatted(room)} are available"))
        try:
            memory = allocate(size, torch.uint8, pin=can_pin(self.device), device=self.device)
        except HostMemoryError as error:
            raise type(error)(self._message(size, "the system does not provide more")) from error
        self.held += size
        return HostBuffer(memory)

    def _message(self, size: int, why: str) -> str:
        kind = "page-locked " if can_pin(self.device) else ""
        return (
            f"rank {current_rank()}: activation_offload: {formatted(size)} of {kind}host memory can't be allocated in "
            f"addition to the {formatted(self.held)} held already: {why}. Offload fewer layers, take smaller batches, or run "
            "fewer ranks on this host."
        )


def _size_class(nbytes: int) -> int:
    step = max(_PAGE, (1 << nbytes.bit_length()) // (2 * _CLASSES))
    return -(-nbytes // step) * step
