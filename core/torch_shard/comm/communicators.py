"""Makes the collectives of one engine from a process group and a topology."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Sequence

import torch
import torch.distributed as dist

from ..config.shard_config import ShardConfig
from ..log import logger
from .collectives import Collectives
from .mesh import Mesh
from .process_groups import ProcessGroups, backend_of, groups_for
from .registered_memory import RegisteredMemory, check_registers
from .small_collectives import ScalarComm
from .streams import orders_streams
from .watchdog import Watchdog, blocking
from .work import Channel


def connect(mesh: Mesh, config: ShardConfig) -> Collectives:
    """Make the collectives of an engine over the ranks of `mesh`. Collective over them.

    If the ranks' topologies differ, no process group is made for a topology. The result then serves only for the vote by
    which set-up reports the difference (:func:`torch_shard.setup.checks.agree`).

    Raises:
        ConfigError: the ranks differ in `single_communicator`, or the backend registers no memory.
    """
    group, device, topology = mesh.group, mesh.device, mesh.topology
    if group is None or dist.get_world_size(group) == 1:
        watchdog = Watchdog(0, [0], config.timeout, "")
        alone = ScalarComm(watchdog)
        return Collectives(device, watchdog, topology, alone, alone, alone, alone)
    backend = backend_of(group, device.type)
    if config.registered_memory:
        check_registers(backend, device)
    single_communicator = config.single_communicator or (orders_streams(backend) and _has_one_queue())
    groups, agreed = groups_for(group, device, single_communicator, config.timeout, f"{topology} {mesh.secondary_size}")
    groups.forget_ended()
    rank = dist.get_rank(group)
    watchdog = Watchdog(rank, groups.ranks, config.timeout, groups.key)
    watchdog.on_streams = orders_streams(backend)
    logger.debug("collectives over ranks %s, backend %s", groups.ranks, backend)
    # An NCCL communicator serialises its collectives even on different streams. Gathers and reductions therefore have one
    # communicator each, unless `single_communicator` is set because two cannot be had. The user's own group is not used: a
    # gather that is left without its partner must not make that group unusable.
    all_ranks = range(topology.world)
    # Gathers and reductions send the device's tensors only. With all backends of the user's group, each of these groups would
    # connect all hosts with all others, too.
    own = backend if watchdog.on_streams else None
    gather = watchdog.add(Channel("all-gather", groups, all_ranks, backend=own))
    reduce = watchdog.add(Channel("reduce", groups, all_ranks, "", own, gather if single_communicator else None))
    # This group is for comparisons of the ranks, which are messages between hosts. On a GPU a message would wait in the queue
    # behind a gather that may lack its partner. Nothing else may use it: a rank may have left a comparison behind.
    watchdog.add(Channel("control", groups, all_ranks, backend="gloo" if groups.key else None))
    scalars = f"cpu:gloo,{device.type}:{backend}" if watchdog.on_streams and device.type != "cpu" else None
    scalar = watchdog.add(Channel("scalar", groups, all_ranks, backend=scalars))
    watchdog.add(Channel("host barrier", groups, all_ranks, shares=scalar))
    watchdog.add(Channel("message", groups, all_ranks, shares=scalar))
    over_all = ScalarComm(watchdog, scalar, device=device if watchdog.on_streams else None)
    c = Collectives(device, watchdog, topology, over_all, over_all, over_all, over_all, gather, reduce, backend=backend)
    if watchdog.on_streams:
        c.gather_stream, c.reduce_stream, c.replica_stream = groups.streams_on(device)
        c.released = groups.released
    if agreed:  # making groups under different topologies would deadlock
        _divide(c, groups, own, scalars, mesh.secondary_size)
        if watchdog.on_streams:
            _begin_all(c, groups)
        if config.registered_memory:
            c.memory = groups.memory.setdefault(device, RegisteredMemory(device))
            c.memory.register(ch for ch in watchdog.channels.values() if ch.purpose in ("all-gather", "reduce"))
    return c


def _has_one_queue() -> bool:
    """Return True if the environment gives all streams of a device one queue. Warn of settings that cost the overlap."""
    one_queue = os.environ.get("CUDA_DEVICE_MAX_CONNECTIONS") == "1"
    if one_queue:
        # Two communicators whose collectives two ranks begin in different order would wait for each other there.
        logger.warning(
            "CUDA_DEVICE_MAX_CONNECTIONS is 1, so that gathers and reductions share a communicator, as with "
            "ShardConfig(single_communicator=True): reductions begin when backward ends. Unset it for more speed."
        )
    if os.environ.get("TORCH_NCCL_BLOCKING_WAIT", os.environ.get("NCCL_BLOCKING_WAIT")) == "1":
        logger.warning(
            "TORCH_NCCL_BLOCKING_WAIT is 1: the host waits for each collective, and nothing overlaps. Unset it."
        )
    return one_queue


def _begin_all(c: Collectives, groups: ProcessGroups) -> None:
    """Run a first collective in each process group, in the order in which all ranks have made them. Collective.

    NCCL makes a communicator in the first collective of its group, and the host waits there for the other ranks without a
    limit. In the first backward, ranks that come to two of them in different order would wait for each other.
    """
    watchdog = c.watchdog
    fresh = {id(ch.group): ch for ch in watchdog.channels.values() if ch.name not in groups.begun}
    if not fresh:
        return
    # The wait that has a limit: from here on no rank is missing.
    what = "the first use of the process groups"
    blocking(watchdog, "message", what, dist.all_reduce, torch.zeros(1, device="cpu"))
    for channel in fresh.values():
        if channel.purpose != "control":
            # Hazard: the tensor's memory goes back to the current stream, which has to wait for the collective.
            blocking(watchdog, channel.name, what, dist.all_reduce, torch.zeros(1, device=c.device), ordered=True)
    groups.begun.update(watchdog.channels)


def _divide(
    c: Collectives,
    groups: ProcessGroups,
    device_backend: str | None,
    scalar_backends: str | None,
    secondary_size: int | None,
) -> None:
    """Make the channels and communicators that do not have all ranks, and put them into `c`. Collective."""
    topology, rank = c.topology, c.world_rank
    if topology not in groups.topologies:
        groups.topologies.append(topology)
    number = groups.topologies.index(topology)  # equal on all ranks

    def channel(purpose: str, role: str, members: Sequence[int], shares: Channel | None = None) -> Channel:
        backend = scalar_backends if purpose == "scalar" else device_backend
        return c.watchdog.add(Channel(purpose, groups, members, f"{number} {role}", backend, shares))

    def comm(role: str, members: Sequence[int], over_replicas: ScalarComm | None = None) -> ScalarComm:
        if len(members) == 1:
            return ScalarComm(c.watchdog)
        if len(members) == topology.world:
            return c.all_ranks
        return ScalarComm(c.watchdog, channel("scalar", role, members), over_replicas, c.all_ranks.device)

    shard_group, data_parallel_group = topology.shard_group_of(rank), topology.data_parallel_group_of(rank)
    c.data_parallel = comm("data parallel", data_parallel_group)
    c.scalar = c.data_parallel if shard_group == data_parallel_group else comm("shard", shard_group, c.data_parallel)
    if topology.data_parallel_groups > 1:
        c.full_model = comm("full model", topology.full_model_group_of(rank), c.all_ranks)
    if 1 < topology.size < topology.world:
        one = c.in_one_order
        c.gather_channel = channel("all-gather", "shard", shard_group)
        c.reduce_channel = channel("reduce", "shard", shard_group, c.gather_channel if one else None)
    elif 1 < len(data_parallel_group) < topology.world:
        c.reduce_channel = channel("reduce", "data parallel", data_parallel_group)
    if topology.is_hybrid:
        c.replica_channel = channel("reduce", "replica", topology.replica_group_of(rank))
        c.waiting = groups.waiting.setdefault(c.replica_channel.name, deque())
    if topology.data_parallel_groups > 1 and topology.size > 1:
        c.tp_replica_channel = channel("reduce", "tensor-parallel replica", topology.tp_replica_group_of(rank))
    if secondary_size is not None:
        members = topology.secondary_group_of(rank, secondary_size)
        c.secondary_channel = channel("all-gather", f"secondary {secondary_size}", members)
