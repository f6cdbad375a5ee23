"""How long a step takes, by the figures of a device and its links: operators and collectives on streams, as they overlap.

The seconds are those of :mod:`torch_shard.plan.roofline`, and serve to rank settings.
"""

from __future__ import annotations

import torch

from .hardware import Hardware
from .roofline import Span, Timeline, bytes_sent, collective_seconds, copy_seconds, operator_seconds
from .step_trace import CollectiveStart, CollectiveWait, HostUpdate, Operator, StepTrace

STREAMS = {"all_gather": "gather", "reduce_scatter": "reduce", "all_reduce": "between replicas"}
"""The streams on which collectives run."""
_BY_CORES = 0.5
"""The part of a collective's time that is taken from computing on CPUs, where Gloo's threads copy on the same cores.

It was measured with two ranks on two cores (``bench/choice.py``).
"""
_NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float8_e4m3fn: "fp8",
    torch.float8_e5m2: "fp8",
}


def timeline_of(step: StepTrace, hardware: Hardware, clock: list[float] | None = None) -> Timeline:
    """Return the time line of a step.

    The streams are ``compute``, ``gather``, ``reduce`` and ``between replicas``; with offload also ``to host``, ``from host`` and
    ``host``, which steps the optimizer.

    A collective begins when what was computed before it was issued has ended, and the stream that it runs on has nothing else to
    do. What is computed after a wait begins when the collective has ended. On CPUs a collective takes a part of its time from
    computing, too.

    Args:
        step: a step of the plain model or of a sharded one.
        hardware: what computes, and the links, of which that between nodes is as each rank has it.
        clock: a list to which is added, for each event of the step, the second at which what was computed before it has ended.

    Raises:
        ConfigError: the device has no figure for the dtype of a matrix product.
    """
    device, ranks_per_node = hardware.device, hardware.ranks_per_node
    timeline = Timeline(device.host_seconds)
    running: dict[int, Span] = {}
    awaited: list[Span] = []
    latest: list[Span] = []  # the latest work of the compute stream
    reduced: list[Span] = []  # the reduction within the replica that was issued last
    updates: dict[str, Span] = {}  # of units, by the host
    host_rate = device.host_memory_bandwidth / ranks_per_node
    for event in step.events:
        if clock is not None:
            clock.append(timeline.free["compute"])
        if isinstance(event, Operator):
            nbytes = event.read + event.written
            if not (nbytes or event.flops):
                continue
            dtype = "fp32" if event.dtype is None else _NAMES.get(event.dtype, "fp32")
            seconds = operator_seconds(device, event.flops, nbytes, dtype)
            latest = [timeline.run("compute", seconds, awaited, event.module or event.name, "compute")]
            awaited = []
        elif isinstance(event, CollectiveStart):
            if event.kind == "to_device" or event.kind == "to_host":
                # Activations, which belong to no unit, come back on a stream of their own.
                back = "gather" if event.unit else "from host"
                stream = "to host" if event.kind == "to_host" else back
                seconds = copy_seconds(device.host_link, event.nbytes)
                timeline.sent[event.kind, "host and device"] += event.nbytes
                after = [*latest, updates[event.unit]] if event.unit in updates else latest
                running[event.number] = timeline.run(stream, seconds, after, event.unit or "activations", event.kind)
                continue
            in_node = max(1, ranks_per_node // event.stride)
            seconds = collective_seconds(event.kind, event.nbytes, event.ranks, in_node, hardware.intra, hardware.inter)
            within, across = bytes_sent(event.kind, event.nbytes, event.ranks, in_node)
            timeline.sent[event.kind, "within a node"] += round(within)
            timeline.sent[event.kind, "between nodes"] += round(across)
            after = [*latest, *reduced] if event.kind == "all_reduce" else latest
            running[event.number] = timeline.run(STREAMS[event.kind], seconds, after, event.unit, event.kind)
            if step.device == "cpu":
                timeline.run("compute", _BY_CORES * seconds, (), event.unit, event.kind, host_seconds=0.0)
            reduced = [running[event.number]] if event.kind == "reduce_scatter" else []
        elif isinstance(event, HostUpdate):
            seconds = event.nbytes / host_rate
            updates[event.unit] = timeline.run("host", seconds, (), event.unit, "host_step", host_seconds=0.0)
        elif isinstance(event, CollectiveWait):
            awaited.append(running.pop(event.number))
    return timeline
