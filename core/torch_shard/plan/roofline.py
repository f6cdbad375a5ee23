"""How long operators, collectives and copies take, from figures of data sheets, so that settings can be ranked.

Nothing is measured here, and the seconds are not meant as a prediction: a program takes longer, by a factor that is much the
same for settings that run the same operators. They are to tell which of two settings is faster, and where one of them waits.
Not modelled are, above all, caches, shapes that fit a device badly, kernels and collectives that slow each other down while
they overlap, links within a node that several groups load at one time, and clocks that fall under load.

Sources: the roofline is of Williams, Waterman and Patterson, "Roofline: An Insightful Visual Performance Model for Multicore
Architectures" (CACM 52(4), 2009). That a message takes a latency and its bytes over a bandwidth is Hockney's model ("The
communication challenge for MPP", Parallel Computing 20(3), 1994). How many bytes a link carries for a collective is in
doc/PERFORMANCE.md of NCCL's tests, and how many steps that takes in NCCL's src/graph/tuning.cc.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable
from typing import Literal, NamedTuple

from ..errors import ConfigError
from .devices import Device, Link

Collective = Literal["all_gather", "reduce_scatter", "all_reduce"]


def operator_seconds(device: Device, flops: float, nbytes: float, dtype: str) -> float:
    """Return the seconds that an operator of one kernel takes on a device, without the host's time to issue it.

    That is the longer of computing and moving its bytes, as if these overlapped entirely, and the launch.

    Args:
        device: the device.
        flops: its floating-point operations, of which a multiplication and an addition are two. For element-wise operators,
            which wait for memory, 0 will do.
        nbytes: the bytes that it reads and writes in the device's memory.
        dtype: the number format in which it computes, a name of :data:`torch_shard.plan.devices.DTYPES`. Without operations it is
            not looked at.

    Raises:
        ConfigError: the device has no figure for the dtype.
    """
    compute = 0.0
    if flops:
        if dtype not in device.peak_flops:
            raise ConfigError(
                f"dtype must be one that {device.name} has: {', '.join(device.peak_flops)}; not {dtype!r}."
            )
        compute = flops / (device.peak_flops[dtype] * device.matmul_fraction)
    memory = nbytes / (device.memory_bandwidth * device.memory_fraction)
    return max(compute, memory) + device.launch_seconds


def copy_seconds(link: Link, nbytes: float) -> float:
    """Return the seconds of a copy over a link in one direction, such as from the host with ``device.host_link``."""
    return link.latency + nbytes / link.rate


def collective_seconds(
    kind: Collective, nbytes: float, ranks: int, ranks_per_node: int, intra: Link, inter: Link
) -> float:
    """Return the seconds of a collective that nothing else disturbs, from when its last rank has come.

    The ranks form rings, as in NCCL, which pass from node to node. Over several nodes an all-reduce may be a tree instead,
    which takes a number of steps that grows with the logarithm of the nodes, and moves a little more; the faster one counts.
    Gathers and scatters are rings on any number of nodes, so that their latency grows with the number of ranks.

    The NICs: `inter` is what each rank has. A node of 8 ranks in the group sends with 8 times this bandwidth, over 8 rings that
    each leave by another NIC; a group with one rank in each node, such as one that all-reduces between replicas, has that
    rank's alone, since the other ranks' groups use the other NICs at the same time. Where ranks share a NIC, divide its
    bandwidth by their number. If the last node has fewer ranks than the others, it is the bottleneck.

    Args:
        kind: ``all_gather``, ``reduce_scatter`` or ``all_reduce``.
        nbytes: the bytes of the whole, as NCCL's tests count: of the gathered result, of what is reduced on each rank before
            it is scattered, of what is all-reduced.
        ranks: the ranks of the group. One rank takes no time.
        ranks_per_node: how many of the group's ranks a node has. They fill one node after the other.
        intra: the link between ranks of a node.
        inter: the link between nodes, as each rank has it. Not used within one node.
    """
    if ranks == 1:
        return 0.0
    nodes = math.ceil(ranks / ranks_per_node)
    if nodes == 1:
        seconds_per_byte = 1 / intra.rate
    else:
        # A rank of a ring sends either to its neighbour in the node or, as one of the node's, to the next node. With as many
        # rings as NICs, each rank does the latter in one of them, and the NIC of a node's only rank takes all.
        within = (ranks_per_node - 1) / ranks_per_node / intra.rate
        seconds_per_byte = max(within, 1 / ((ranks % ranks_per_node or ranks_per_node) * inter.rate))
    passes = 2 if kind == "all_reduce" else 1
    latency = passes * ((nodes - 1) * inter.latency + (ranks - nodes) * intra.latency)
    ring = nbytes * _moved(kind, ranks) * seconds_per_byte + latency
    if kind != "all_reduce" or nodes == 1:
        return ring
    # A chain in each node, and a double binary tree over the nodes, up and down.
    depth = math.ceil(math.log2(nodes))
    latency = 2 * (depth * inter.latency + (min(ranks, ranks_per_node) - 1) * intra.latency)
    return min(ring, 2 * nbytes * seconds_per_byte + latency)


def bytes_sent(kind: Collective, nbytes: float, ranks: int, ranks_per_node: int) -> tuple[float, float]:
    """Return the bytes that a rank sends within its node and to other nodes, in the mean of the ranks of a ring.

    The arguments are those of :func:`collective_seconds`. Of the links of a ring, one leads out of each node.
    """
    nodes = math.ceil(ranks / ranks_per_node)
    sent = nbytes * _moved(kind, ranks)
    across = sent * nodes / ranks if nodes > 1 else 0.0
    return sent - across, across


def _moved(kind: Collective, ranks: int) -> float:
    """Return how many times its bytes a rank sends."""
    return (2 if kind == "all_reduce" else 1) * (ranks - 1) / ranks  # it reduces and scatters, then gathers


class Span(NamedTuple):
    """Work on a stream, in seconds since the timeline's beginning. Other work can wait for its end.

    Attributes:
        stream: the name of the stream.
        start, end: the seconds at which it begins and ends.
        name: what it is, such as the name of a unit.
        kind: which sort of work it is, such as ``"compute"`` or ``"all_gather"``; for colours and sums.
    """

    stream: str
    start: float
    end: float
    name: str
    kind: str


class Timeline:
    """Streams of a device, and the host that issues their work: one operator after the other, in the order of the calls.

    A stream runs its work in the order in which it was issued. A step whose kernels are shorter than what the host takes to issue
    them is so bound by launches, which shows as gaps in its streams. The host runs ahead of the device without limit.

    Attributes:
        host_seconds: what the host takes to issue one piece of work, if that doesn't say otherwise.
        host: the second until which the host is busy.
        free: the second at which the work of each stream ends.
        spans: all work, in the order in which it was issued.
        sent: the bytes that a rank sends or copies, by the kind of work and the link.
        total: the second at which the last work ends.
    """

    def __init__(self, host_seconds: float = 0.0) -> None:
        self.host_seconds = host_seconds
        self.host = 0.0
        self.free: defaultdict[str, float] = defaultdict(float)
        self.spans: list[Span] = []
        self.sent: Counter[tuple[str, str]] = Counter()
        self.total = 0.0

    def run(
        self,
        stream: str,
        seconds: float,
        after: Iterable[Span] = (),
        name: str = "",
        kind: str = "",
        host_seconds: float | None = None,
    ) -> Span:
        """Issue work, which starts once the host has issued it, the stream is free and the events in `after` have happened.

        Args:
            stream: the name of the stream.
            seconds: how long it takes.
            after: spans of any stream of the timeline that must have ended.
            name: what it is.
            kind: which sort of work it is.
            host_seconds: what the host takes to issue it; the timeline's by default, 0 for work that the host does not issue.

        Returns:
            The span, as an event for others to wait for.
        """
        self.host += self.host_seconds if host_seconds is None else host_seconds
        start = max(self.host, self.free[stream], *(event.end for event in after))
        span = Span(stream, start, start + seconds, name, kind)
        self.free[stream] = span.end
        self.total = max(self.total, span.end)
        self.spans.append(span)
        return span
