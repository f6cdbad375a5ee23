"""A simulated accelerator in place of the CPU, for one rank."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from torch_shard.checkpoint.sharded import host_snapshot
from torch_shard.comm import collectives, communicators, mesh, streams
from torch_shard.fsdp import _fully_shard
from torch_shard.offload import host_buffers, pinned
from torch_shard.shard_tensor import reductions

from . import process_group
from .autograd import BackwardThread
from .host_threads import ordered_tasks
from .memory import PINNED
from .modes import ACCELERATOR, Calls, Operations, World, make_wrapper, resizes, run_backward
from .sites import Site
from .streams import Pace, SimulatedStreams


@contextlib.contextmanager
def simulated(
    pace: Pace = "early", seed: int = 0, dropped: Iterable[Site] = (), own_streams: bool = False
) -> Iterator[World]:
    """Return a context in which this rank's tensors are those of a simulated device.

    Args:
        pace, dropped: see the streams.
        own_streams: see the process group.
    """
    process_group.register()
    own = World(SimulatedStreams(pace, seed, dropped))
    allocate = pinned.allocate

    def page_locked(numel: int, dtype: torch.dtype, *, pin: bool, device: torch.device) -> torch.Tensor:
        made = allocate(numel, dtype, pin=False, device=device)  # nothing is to be locked
        if made.numel():
            own.memory.allocate(made.untyped_storage(), PINNED if pin else "host", None)
        return made

    snapshot = host_snapshot.SnapshotMemory.snapshot

    def written_soon(self: Any, tensors: Any) -> Any:
        copies = snapshot(self, tensors)
        with torch._C.DisableTorchFunction():
            own.by_host("threads that write a checkpoint", copies, [])  # they read without torch
        return copies

    with contextlib.ExitStack() as stack:
        stack.enter_context(_attribute(host_snapshot.SnapshotMemory, "snapshot", written_soon))
        stack.enter_context(_set(streams._kept, ACCELERATOR, own.streams))
        stack.enter_context(_attribute(collectives, "like_nccl", lambda backend: True))
        stack.enter_context(_attribute(communicators, "check_registers", lambda *_: None))
        for user in (_fully_shard, reductions):
            stack.enter_context(_attribute(user, "current_streams", lambda: own.streams))
        for device in ("_device_of", "_checked_device"):
            stack.enter_context(_attribute(mesh, device, lambda *_: ACCELERATOR))
        stack.enter_context(_attribute(mesh, "group_over", lambda *_: group()))
        stack.enter_context(_attribute(pinned, "allocate", page_locked))
        stack.enter_context(_attribute(host_buffers, "allocate", page_locked))
        for user in (pinned, host_buffers, host_snapshot):
            stack.enter_context(_attribute(user, "can_pin", lambda device: device == ACCELERATOR))
        stack.enter_context(_attribute(process_group, "world", own))
        stack.enter_context(_attribute(process_group.SimulatedGroup, "own_streams", own_streams))
        stack.enter_context(_attribute(torch.Tensor, "record_stream", lambda t, stream: own.record_stream(t, stream)))
        wrapper = staticmethod(make_wrapper(torch.Tensor._make_wrapper_subclass))
        stack.enter_context(_attribute(torch.Tensor, "_make_wrapper_subclass", wrapper))
        stack.enter_context(resizes(own))
        stack.enter_context(Operations(own))
        ignored = lambda found: own.failures.append(f"{found.exc_value!r} in {found.object!r}")  # noqa: E731
        stack.enter_context(_attribute(sys, "unraisablehook", ignored))
        stack.enter_context(ordered_tasks(own.streams))
        own.streams.modes = lambda: (Operations(own), Calls(own))
        stack.enter_context(Calls(own))
        thread = stack.enter_context(BackwardThread(own.streams, own.backwards))
        run = run_backward(thread, torch.autograd._engine_run_backward)
        stack.enter_context(_attribute(torch.autograd, "_engine_run_backward", run))
        stack.enter_context(_attribute(torch.autograd.Variable, "_execution_engine", _Engine(own)))
        yield own


class _Engine:
    """Autograd's engine, which calls what is queued on the stream that has begun the backward."""

    def __init__(self, world: World) -> None:
        self._world, self._engine = world, torch.autograd.Variable._execution_engine

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def queue_callback(self, callback: Any) -> None:
        def call() -> None:
            self._world.backwards.leave()
            callback()

        self._engine.queue_callback(call)


def group() -> Any:
    """Return a process group over all ranks whose collectives run on the simulated device; None for one rank. Collective."""
    process_group.register()
    return dist.new_group(backend=process_group.BACKEND) if dist.get_world_size() > 1 else None


@contextlib.contextmanager
def _set(mapping: dict[Any, Any], key: Any, value: Any) -> Iterator[None]:
    missing = object()
    before = mapping.get(key, missing)
    mapping[key] = value
    try:
        yield
    finally:
        if before is missing:
            mapping.pop(key, None)
        else:
            mapping[key] = before


@contextlib.contextmanager
def _attribute(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
