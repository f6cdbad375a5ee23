"""Makes the collectives of one engine from a process group and a topology."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..layout.rank_topology import Topology
from ..log import logger
from .collectives import Collectives
from .process_groups import Groups, Parts, backend_of, groups_for, parts_for, secondary_group_for
from .small_collectives import ScalarComm, SingleComm
from .watchdog import Watch, blocking
from .work import Channel

__all__ = ["connect"]


def connect(
    group: Any,
    device: torch.device,
    topology: Topology,
    *,
    timeout: float,
    single_communicator: bool,
    again: int | None = None,
) -> Collectives:
    """Make the collectives of an engine over `group`. Collective over `group`.

    If the ranks' topologies differ, no process group is made for a topology. The result then serves only for the vote by
    which set-up reports the difference (:func:`.setup.checks.agree`).

    Args:
        group: the process group over the engine's ranks; None for one rank alone without any process group.
        device: the device of this rank.
        topology: how the ranks share the parameters.
        timeout: seconds that a rank waits for the others.
        single_communicator: True if gathers and reductions share a communicator.
        again: the number of ranks among which a unit is sharded between forward and backward (secondary shards), if any.
    """
    if group is None or dist.get_world_size(group) == 1:
        watch = Watch(0, 1, [0], timeout, "")
        return Collectives(device, 1, 0, 1, 0, watch, SingleComm(), SingleComm(), topology, SingleComm(), SingleComm())
    ranks = dist.get_process_group_ranks(group)
    rank, world = dist.get_rank(group), len(ranks)
    groups = groups_for(group, single_communicator, timeout)
    groups.forget_ended()
    watch = Watch(rank, world, ranks, timeout, groups.key)
    everyone = range(world)
    for name in ("gather", "reduce", "scalar", "control", "meet"):
        watch.channels[name] = Channel(name, groups, getattr(groups, name), everyone)
    backend = backend_of(group, device.type)
    side = backend == "nccl"
    watch.polls = side
    logger.debug("collectives over ranks %s, backend %s", ranks, backend)
    streams = groups.streams_on(device) if side else (None, None)
    agreed = _agree_on(f"{topology} {again}", watch)
    over_all = ScalarComm(watch.channels["scalar"], watch, world, rank, device=device if side else None)
    made: dict[str, Any] = {
        "scalar": over_all if topology.size > 1 else SingleComm(world_rank=rank),
        "plane": over_all,
        "whole": over_all,
        "gather_channel": watch.channels["gather"],
        "reduce_channel": watch.channels["reduce"],
    }
    if (
        topology.is_hybrid or topology.planes > 1
    ) and agreed:  # making groups under different topologies would deadlock
        made |= _divided(parts_for(groups, group, topology, single_communicator), groups, topology, watch, over_all)
    if again is not None and agreed:
        among = secondary_group_for(groups, group, topology, again)
        number = list(groups.again).index((topology, again))
        few = Channel("gather again", groups, among, topology.part_of(rank, again), number)
        made["secondary_channel"] = watch.channels[few.name] = few
    return Collectives(
        device=device,
        world=world,
        world_rank=rank,
        size=topology.size,
        rank=topology.row_of(rank).index(rank),
        watch=watch,
        everyone=over_all,
        topology=topology,
        backend=backend,
        gather_stream=streams[0],
        reduce_stream=streams[1],
        **made,
    )


def _divided(parts: Parts, groups: Groups, topology: Topology, watch: Watch, over_all: ScalarComm) -> dict[str, Any]:
    """Return the fields of :class:`Collectives` that are not over all ranks: several replicas or data-parallel groups exist."""
    rank = watch.rank
    made: dict[str, Any] = {}

    number = list(groups.parts).index(topology)  # equal on all ranks

    def channel(purpose: str, group: Any, members: Sequence[int]) -> Channel:
        found = Channel(purpose, groups, group, members, number)
        watch.channels[found.name] = found
        return found

    def scalars(name: str, group: Any, members: Sequence[int], wider: ScalarComm | None) -> ScalarComm:
        number_of = members.index(rank)
        return ScalarComm(channel(name, group, members), watch, len(members), number_of, wider, over_all.device)

    row, plane = topology.row_of(rank), topology.plane_of(rank)
    over_plane: ScalarComm | SingleComm = over_all
    if parts.plane is not None:
        over_plane = scalars("plane", parts.plane, plane, None)
        made["plane_channel"] = over_plane.channel
        made["whole"] = scalars("whole", parts.whole, topology.whole_of(rank), over_all)
    if parts.scalar is not None:
        wider = over_plane if topology.is_hybrid and isinstance(over_plane, ScalarComm) else None
        made["scalar"] = inner = scalars("scalar slices", parts.scalar, row, wider)
        over_plane = over_plane if topology.is_hybrid else inner
        made["gather_channel"] = channel("gather", parts.gather, row)
    if parts.reduce is not None:
        made["reduce_channel"] = channel("reduce slices", parts.reduce, row if topology.size > 1 else plane)
        made.setdefault("plane_channel", made["reduce_channel"] if topology.planes > 1 else None)
    if parts.across is not None:
        made["replica_channel"] = channel("across", parts.across, topology.column_of(rank))
        made["waiting"] = parts.waiting
    if parts.lane is not None:
        made["lane_channel"] = channel("lane", parts.lane, topology.lane_of(rank))
    made["plane"] = over_plane if topology.averaged > 1 else SingleComm(world_rank=rank)
    return made


def _agree_on(text: str, watch: Watch) -> bool:
    """Return True if `text` is equal on all ranks. Collective."""
    digest = zlib.crc32(text.encode()).to_bytes(4, "little")
    message = torch.tensor([*digest, *(255 - b for b in digest)], dtype=torch.uint8, device="cpu")
    blocking(watch, "control", "the set-up of a sharded model (shard)", dist.all_reduce, message, op=dist.ReduceOp.MAX)
    answer = message.tolist()
    return all(a + b == 255 for a, b in zip(answer[:4], answer[4:], strict=True))
