"""Turns the user's `mesh` into a process group, this rank's device, and a topology of how the ranks share the parameters."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from ..config.shard_config import ShardConfig
from ..errors import ConfigError, SetupError, UnavailableError
from ..layout.dtensor_placement import data_parallel_groups_of, ranks_in, tensor_mesh
from ..layout.rank_topology import Topology
from ..versions import check_torch
from .process_groups import backend_of, group_over
from .rendezvous import exchange_texts
from .streams import accelerator, indexed, orders_streams

_Ranks = Sequence[Sequence[int]]
"""The global ranks of each of several groups."""


@dataclass(frozen=True, eq=False)
class Mesh:
    """The ranks and the device over which a model is sharded.

    Attributes:
        group: the process group over all ranks; None for one rank alone.
        device: the device of this rank.
        topology: the division of the ranks into shard groups and replica groups.
        secondary_size: the number of ranks among which a unit is sharded between forward and backward (secondary shards); None if
            these are all ranks that share a replica.
    """

    group: Any
    device: torch.device
    topology: Topology
    secondary_size: int | None = None


def resolve_mesh(mesh: Any, model: nn.Module, config: ShardConfig) -> Mesh:
    """Resolve `mesh`, the second argument of ``shard``. Collective if process groups have to be made or asked."""
    check_torch()
    if not dist.is_available():
        raise UnavailableError(
            "this build of torch has no torch.distributed, so a model can't be sharded; install torch with distributed "
            "support (the builds for Linux have it)."
        )
    group: Any = None
    device: torch.device | None = None
    replicas: _Ranks | None = None  # if the mesh tells them
    parallel_groups: _Ranks | None = None  # the data-parallel groups, if there is tensor parallelism
    parallel = tensor_mesh(model)
    if hasattr(mesh, "get_group") and hasattr(mesh, "device_type"):
        mesh, replicas = _dimensions(mesh, config)
        device = _checked_device(torch.device(mesh.device_type))
        own = sorted(ranks_in(mesh))
        if parallel is not None:
            parallel_groups = data_parallel_groups_of(mesh, parallel[1], parallel[0])
        group = (
            mesh.get_group()
            if replicas is None and parallel_groups is None
            else _group_over(parallel_groups or [own], config)
        )
    elif parallel is not None:
        raise SetupError(
            f"mesh: parameter {parallel[0]} is a DTensor over {parallel[1]}, so which ranks have the same part of it must be "
            "known; pass the other dimension of its mesh, shard(model, mesh=mesh['dp'])."
        )
    else:
        if isinstance(mesh, (tuple, list)) and len(mesh) == 2:
            replicas = _replicas_of_pair(mesh, config)
            group = _group_over(replicas, config)
        elif mesh is None or isinstance(mesh, torch.device):
            group, device = _default_group(), None if mesh is None else _checked_device(mesh)
        else:
            group = _checked_group(mesh)
        own = [0] if group is None else dist.get_process_group_ranks(group)
        if group is not None and config.mesh_dims is not None:
            raise ConfigError("mesh_dims names dimensions of a DeviceMesh; pass one as mesh, or leave mesh_dims out.")
    device = device or _device_of(model, group)
    if group is not None and not backend_of(group, device.type):
        raise UnavailableError(
            f"the process group ({dist.get_backend_config(group)}) has no backend for tensors on {device.type}: initialise "
            "it with 'cpu:gloo,cuda:nccl', or move the model to a device that it serves."
        )
    topology = _topology(own, replicas, config)
    if parallel_groups is not None:
        if topology.is_hybrid:
            raise ConfigError(
                f"strategy: {config.strategy!r} of parameters that are parallelized over another dimension is not supported; "
                "shard over all data-parallel ranks (strategy='full_shard'), or leave them unsharded ('no_shard')."
            )
        topology = topology.within(parallel_groups, dist.get_process_group_ranks(group))
    secondary_size = None if topology.world == 1 else config.reshard_after_forward
    if secondary_size is not None and topology.size % secondary_size:
        raise ConfigError(
            f"reshard_after_forward is {secondary_size}, which does not divide the {topology.size} ranks of a replica."
        )
    return Mesh(group, device, topology, None if secondary_size == topology.size else secondary_size)


# -- the ranks ----------------------------------------------------------------------------------------------------------


def _group_over(groups: _Ranks, config: ShardConfig) -> Any:
    return group_over(sorted(rank for ranks in groups for rank in ranks), config.timeout)


def _default_group() -> Any:
    if dist.is_initialized():
        return dist.group.WORLD
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UnavailableError(
            f"WORLD_SIZE is {os.environ['WORLD_SIZE']} but torch.distributed is not initialised; call "
            "torch.distributed.init_process_group() before shard()."
        )
    return None


def _checked_group(group: Any) -> Any:
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise SetupError(
            f"mesh: rank {dist.get_rank()} is not a member of this process group; call shard() on its members."
        )
    if not isinstance(group, dist.ProcessGroup):
        raise SetupError(
            "mesh must be a ProcessGroup, a DeviceMesh, a torch.device, a pair of process groups (shard, replicate) or None, not "
            f"{type(group).__name__}."
        )
    return group


def _dimensions(mesh: Any, config: ShardConfig) -> tuple[Any, _Ranks | None]:
    """Return the dimensions of a DeviceMesh to shard over, and with two dimensions the ranks of each replica."""
    names = config.mesh_dims
    if names is not None:
        known = mesh.mesh_dim_names or ()
        unknown = [name for name in names if name not in known]
        if unknown:
            raise ConfigError(f"mesh_dims: the mesh has no dimension {unknown[0]!r}, but {known or 'no names'}.")
        # A mesh is sliced along dimensions in its own order.
        mesh = mesh[names[0]] if len(names) == 1 else mesh[tuple(sorted(names, key=known.index))]
    if mesh.ndim == 1:
        return mesh, None
    if mesh.ndim == 2 and config.is_hybrid:
        return mesh, (mesh.mesh if names is None or mesh.mesh_dim_names == names else mesh.mesh.T).tolist()
    raise SetupError(
        f"mesh has {mesh.ndim} dimensions ({mesh.mesh_dim_names}), and strategy {config.strategy!r} takes one; name the one to "
        "shard over, ShardConfig(mesh_dims='name'), or pass it, mesh['name']. (The hybrid strategies take two: replicas, and "
        "shards.)"
    )


def _replicas_of_pair(groups: Sequence[Any], config: ShardConfig) -> _Ranks:
    """Return the ranks of each replica for FSDP's pair of groups: the ranks of a replica, and those with the same shard."""
    shard, replicate = (_checked_group(group) for group in groups)
    if not config.is_hybrid:
        raise ConfigError(
            f"mesh is a pair of process groups, which a hybrid strategy needs; strategy is {config.strategy!r}."
        )
    # Each replica's rank that has the same shard as this rank tells which ranks share its replica.
    own, others = dist.get_process_group_ranks(shard), dist.get_process_group_ranks(replicate)
    name = f"torch_shard/pair/{replicate.group_name}/{others}"
    _, texts = exchange_texts(others, name, json.dumps(own), config.timeout)
    return sorted(json.loads(text) for text in texts.values())


# -- the device ---------------------------------------------------------------------------------------------------------


def _checked_device(device: torch.device) -> torch.device:
    if device.type == "cpu":
        return torch.device("cpu")
    kind = accelerator()
    if device.type != kind:
        there = f" and {kind} devices" if kind else ""
        raise SetupError(f"mesh: {device} is no device of this machine's; shards can be on the CPU{there}.")
    return indexed(device)


def device_for(model: nn.Module, mesh: Any) -> torch.device:
    """Return the device on which a model will compute that is sharded over all ranks. Not collective."""
    if isinstance(mesh, torch.device) or hasattr(mesh, "device_type"):
        return _checked_device(mesh if isinstance(mesh, torch.device) else torch.device(mesh.device_type))
    return _device_of(model, _default_group())


def _device_of(model: nn.Module, group: Any) -> torch.device:
    """Return the accelerator that holds parameters, or the current one if `group` has its backend, or the CPU."""
    kind = accelerator()
    found = next((p.device for p in model.parameters() if p.device.type == kind), None)
    if found is not None:
        return found
    has_backend = kind and group is not None and orders_streams(backend_of(group, kind))
    return indexed(torch.device(kind)) if has_backend else torch.device("cpu")


# -- the topology -------------------------------------------------------------------------------------------------------


def _topology(ranks: Sequence[int], replicas: _Ranks | None, config: ShardConfig) -> Topology:
    world = len(ranks)
    if config.strategy == "no_shard":
        return Topology.replicated(world)
    if not config.is_hybrid or world == 1:
        return Topology.sharded(world)
    if replicas is not None:
        found = Topology.of_ranks(replicas, ranks)
        if config.shard_size not in (None, found.size):
            raise ConfigError(
                f"shard_size is {config.shard_size}, and in the mesh {found.size} ranks share a replica; leave it out."
            )
        return found
    if config.shard_size is not None:
        if world % config.shard_size:
            raise ConfigError(f"shard_size is {config.shard_size}, which does not divide the {world} ranks.")
        return Topology.hybrid(world, config.shard_size)
    return Topology.of_ranks(_nodes(ranks), ranks)


def ranks_of_node() -> int:
    """Return how many ranks a node has; 0 where that is not known."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or torch.accelerator.device_count()


def _nodes(ranks: Sequence[int]) -> _Ranks:
    """Return the ranks of each node: launchers number the ranks of a node consecutively."""
    size = ranks_of_node()
    nodes: dict[int, list[int]] = {}
    for rank in ranks:
        nodes.setdefault(rank // max(1, size), []).append(rank)
    if size and len({len(node) for node in nodes.values()}) == 1:
        return list(nodes.values())
    why = (
        f"with {size} ranks to a node, the ranks {list(ranks)} are not as many on each"
        if size
        else "how many ranks a node has is not known (LOCAL_WORLD_SIZE is not set)"
    )
    raise ConfigError(f"shard_size: {why}; pass shard_size=, or a mesh of two dimensions (replicas, and shards).")
