"""The collectives of DTensor on a simulated device."""

from __future__ import annotations

from typing import Any

import torch

from .clocks import Agent, Clock
from .memory import DEVICE
from .streams import SimulatedStreams, site

NAMESPACE = "_c10d_functional"
_COLLECTIVES = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "all_to_all_single", "broadcast")


class FunctionalCollectives:
    """Collectives that return a tensor, which is to be waited for (``torch.distributed._functional_collectives``).

    Gloo sends, and the values are there when the call returns. As under NCCL the collective runs on a stream of its group's,
    behind what the current stream was given before, and ``wait_tensor`` makes the current stream wait for it. Until then its
    work holds the tensors.
    """

    def __init__(self, world: Any) -> None:
        self._world = world
        self._communicators: dict[str, Agent] = {}
        self._running: dict[int, tuple[Clock, list[torch.Tensor]]] = {}  # by the address of the result's storage

    def note(self, name: str, args: Any, out: torch.Tensor) -> None:
        """Note a call that has returned `out`."""
        streams: SimulatedStreams = self._world.streams
        key = out.untyped_storage()._cdata
        if name == "wait_tensor":
            clock, _ = self._running.pop(key, ({}, []))
            if clock and streams.orders():
                streams.stream_waits_for(streams.current(), clock)
            return
        if name not in _COLLECTIVES:
            assert "coalesced" not in name
            return
        torch.ops._c10d_functional.wait_tensor(out)
        sent, memory = args[0], self._world.memory
        if memory.kind(sent) != DEVICE:
            return
        where = f"{name} at {site()}"
        here, _ = streams.launch()
        if out is not sent:
            memory.allocate(out.untyped_storage(), DEVICE, here, where)
        group = args[-1] if isinstance(args[-1], str) else args[-1].group_name  # newer torch passes the group itself
        if group not in self._communicators:
            self._communicators[group] = streams.add(Agent(f"the communicator {group}"))
        communicator = self._communicators[group]
        communicator.join(here.clock)
        epoch = communicator.tick()
        memory.access(communicator, epoch, sent, where, writes=False)
        memory.access(communicator, epoch, out, where, writes=True)
        self._running[key] = dict(communicator.clock), [sent, out]
