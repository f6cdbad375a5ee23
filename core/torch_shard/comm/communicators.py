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
from .process_groups import ProcessGroups, SubGroups, backend_of, groups_for, secondary_group_for, sub_groups_for
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
    secondary_size: int | None = None,
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
        secondary_size: the number of ranks among which a unit is sharded between forward and backward (secondary shards), if any.
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
    agreed = _agree_on(f"{topology} {secondary_size}", watch)
    over_all = ScalarComm(watch.channels["scalar"], watch, world, rank, device=device if side else None)
    made: dict[str, Any] = {
        "scalar": over_all if topology.size > 1 else SingleComm(world_rank=rank),
        "data_parallel": over_all,
        "full_model": over_all,
        "gather_channel": watch.channels["gather"],
        "reduce_channel": watch.channels["reduce"],
    }
    if (
        topology.is_hybrid or topology.data_parallel_groups > 1
    ) and agreed:  # making groups under different topologies would deadlock
        made |= _divided(
            sub_groups_for(groups, group, topology, single_communicator), groups, topology, watch, over_all
        )
    if secondary_size is not None and agreed:
        among = secondary_group_for(groups, group, topology, secondary_size)
        number = list(groups.secondary).index((topology, secondary_size))
        secondary = Channel(
            "secondary gather", groups, among, topology.secondary_group_of(rank, secondary_size), number
        )
        made["secondary_channel"] = watch.channels[secondary.name] = secondary
    return Collectives(
        device=device,
        world=world,
        world_rank=rank,
        size=topology.size,
        rank=topology.shard_group_of(rank).index(rank),
        watch=watch,
        everyone=over_all,
        topology=topology,
        backend=backend,
        gather_stream=streams[0],
        reduce_stream=streams[1],
        **made,
    )


def _divided(
    sub_groups: SubGroups, groups: ProcessGroups, topology: Topology, watch: Watch, over_all: ScalarComm
) -> dict[str, Any]:
    """Return the fields of :class:`Collectives` that are not over all ranks: several replicas or data-parallel groups exist."""
    rank = watch.rank
    made: dict[str, Any] = {}

    number = list(groups.sub_groups).index(topology)  # equal on all ranks

    def channel(purpose: str, group: Any, members: Sequence[int]) -> Channel:
        found = Channel(purpose, groups, group, members, number)
        watch.channels[found.name] = found
        return found

    def scalars(name: str, group: Any, members: Sequence[int], wider: ScalarComm | None) -> ScalarComm:
        number_of = members.index(rank)
        return ScalarComm(channel(name, group, members), watch, len(members), number_of, wider, over_all.device)

    shard_group, data_parallel_group = topology.shard_group_of(rank), topology.data_parallel_group_of(rank)
    over_data_parallel: ScalarComm | SingleComm = over_all
    if sub_groups.data_parallel is not None:
        over_data_parallel = scalars("data parallel", sub_groups.data_parallel, data_parallel_group, None)
        made["data_parallel_channel"] = over_data_parallel.channel
        made["full_model"] = scalars("full model", sub_groups.full_model, topology.full_model_group_of(rank), over_all)
    if sub_groups.scalar is not None:
        wider = over_data_parallel if topology.is_hybrid and isinstance(over_data_parallel, ScalarComm) else None
        made["scalar"] = inner = scalars("scalar shards", sub_groups.scalar, shard_group, wider)
        over_data_parallel = over_data_parallel if topology.is_hybrid else inner
        made["gather_channel"] = channel("gather", sub_groups.gather, shard_group)
    if sub_groups.reduce is not None:
        made["reduce_channel"] = channel(
            "reduce shards", sub_groups.reduce, shard_group if topology.size > 1 else data_parallel_group
        )
        made.setdefault("data_parallel_channel", made["reduce_channel"] if topology.data_parallel_groups > 1 else None)
    if sub_groups.replica is not None:
        made["replica_channel"] = channel("replica", sub_groups.replica, topology.replica_group_of(rank))
        made["waiting"] = sub_groups.waiting
    if sub_groups.tp_replica is not None:
        made["tp_replica_channel"] = channel(
            "tensor-parallel replica", sub_groups.tp_replica, topology.tp_replica_group_of(rank)
        )
    made["data_parallel"] = over_data_parallel if topology.data_parallel_size > 1 else SingleComm(world_rank=rank)
    return made


def _agree_on(text: str, watch: Watch) -> bool:
    """Return True if `text` is equal on all ranks. Collective."""
    digest = zlib.crc32(text.encode()).to_bytes(4, "little")
    message = torch.tensor([*digest, *(255 - b for b in digest)], dtype=torch.uint8, device="cpu")
    blocking(watch, "control", "the set-up of a sharded model (shard)", dist.all_reduce, message, op=dist.ReduceOp.MAX)
    answer = message.tolist()
    return all(a + b == 255 for a, b in zip(answer[:4], answer[4:], strict=True))
