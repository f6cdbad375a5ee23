"""Measures what a step allocates, by the allocator's own events: nothing here knows of the engine."""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Callable, Iterable

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.profiler import ProfilerActivity, profile

from .devices import peak_memory, reset_peak_memory


def tensors_here() -> list[torch.Tensor]:
    """Return the tensors of this process whose memory is on the CPU."""
    found = []
    with torch._C.DisableTorchFunctionSubclass():
        for each in gc.get_objects():
            if issubclass(type(each), torch.Tensor) and type(each) is not FakeTensor and each.device.type == "cpu":
                found.append(each)
    return found


def held_by_tensors(tensors: Iterable[torch.Tensor] | None = None) -> int:
    """Return the bytes of memory on the CPU that `tensors` hold, by default all of this process, outside of a step."""
    found: dict[int, int] = {}
    with torch._C.DisableTorchFunctionSubclass():
        for each in tensors_here() if tensors is None else tensors:
            with contextlib.suppress(RuntimeError):  # of wrappers, which have no memory of their own
                storage = each.untyped_storage()
                found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def held(device: torch.device) -> int:
    """Return the bytes that are allocated now; on the CPU those of tensors, outside of a step. A GPU's peak begins anew."""
    if device.type == "cuda":
        return reset_peak_memory(device)
    gc.collect()
    return held_by_tensors()


def peak_of(step: Callable[[], object], device: torch.device) -> tuple[int, int]:
    """Run a step; return the most bytes allocated at one time, with what was there before, and the bytes freed unseen.

    On the CPU the profiler records each event of the allocator, but not those of threads that it does not know, such as Gloo's.
    What these free seems to be held, so that the first number is too high by up to the second.
    """
    if device.type == "cuda":
        reset_peak_memory(device)
        step()
        return peak_memory(device), 0
    gc.collect()
    before = held_by_tensors()
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiled:
        step()
    kineto = profiled.profiler
    assert kineto is not None
    events = [event for event in kineto.kineto_results.events() if event.name() == "[memory]"]
    events.sort(key=lambda event: event.start_ns())
    levels = list(itertools.accumulate((event.nbytes() for event in events), initial=before))
    gc.collect()
    return max(levels), abs(levels[-1] - held_by_tensors())
