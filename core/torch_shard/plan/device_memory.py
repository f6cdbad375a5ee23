"""What a step takes of a device's memory, with the rounding and fragmentation of the caching allocator."""

from __future__ import annotations

from .caching_allocator import Block, CachingAllocator
from .step_trace import Allocation, Free, StepTrace

_STREAMS = {"compute": 0, "gather": 1, "reduce": 2}


def reserved_by(step: StepTrace) -> CachingAllocator:
    """Return an allocator that has served a step on a device with streams; see its `reserved` and `peak_allocated`.

    What is there before the step is allocated first, so that the fragmentation is that of the first step. A later one finds
    the segments of those before, in which the same requests fit.
    """
    found = CachingAllocator()
    blocks: dict[int, Block] = {}
    for event in step.events:
        if isinstance(event, Allocation) and event.device == step.device:
            blocks[event.storage] = found.allocate(event.nbytes, _STREAMS[event.stream])
        elif isinstance(event, Free) and event.storage in blocks:
            found.free(blocks.pop(event.storage))
    return found
