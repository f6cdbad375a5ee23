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
from ..layout.dtensor_placement import planes_of, tensor_mesh
from ..layout.rank_topology import Topology
from ..versions import check_torch
from .process_groups import backend_of, group_over
from .rendezvous import exchange_texts

__all__ = ["Mesh", "resolve_mesh"]


@dataclass(frozen=True, eq=False)
class Mesh:
    """The ranks and the device over which a model is sharded.

    Attributes:
        group: the process group over all ranks; None for one rank alone.
        device: the device of this rank.
        topology: how the ranks share the parameters.
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
    device: torch.device | None = None
    shard_groups: Sequence[Sequence[int]] | None = None  # the global ranks of each replica, if the mesh tells
    parallel = tensor_mesh(model)
    is_mesh = hasattr(mesh, "get_group") and hasattr(mesh, "device_type")
    if parallel is not None and not is_mesh:
        raise SetupError(
            f"mesh: parameter {parallel[0]} is a DTensor over {parallel[1]}, so which ranks have the same part of it must be "
            "known; pass the other dimension of its mesh, shard(model, mesh=mesh['dp'])."
        )
    if mesh is None:
        group = _default_group()
    elif is_mesh:
        mesh, shard_groups = _chosen(mesh, config)
        device = (
            torch.device("cuda", torch.cuda.current_device()) if mesh.device_type == "cuda" else torch.device("cpu")
        )
        if parallel is not None:
            return _with_tensor_parallelism(
                mesh, shard_groups, planes_of(mesh, parallel[1], parallel[0]), device, config
            )
        group = (
            mesh.get_group()
            if shard_groups is None
            else group_over(sorted(rank for ranks_of_one in shard_groups for rank in ranks_of_one), config.timeout)
        )
    elif isinstance(mesh, torch.device):
        group, device = _default_group(), _checked_device(mesh)
    elif isinstance(mesh, (tuple, list)) and len(mesh) == 2:
        group, shard_groups = _of_two_groups(mesh, config)
    else:
        group = _checked_group(mesh)
    if group is not None and config.mesh_dims is not None and not is_mesh:
        raise ConfigError("mesh_dims names dimensions of a DeviceMesh; pass one as mesh, or leave mesh_dims out.")
    device = device or _device_of(model, group)
    _check_backend(group, device)
    ranks = [0] if group is None else dist.get_process_group_ranks(group)
    topology = _topology(ranks, shard_groups, config)
    return Mesh(group, device, topology, _again(topology, config))


def _with_tensor_parallelism(
    mesh: Any,
    shard_groups: Sequence[Sequence[int]] | None,
    data_parallel_groups: list[list[int]],
    device: torch.device,
    config: ShardConfig,
) -> Mesh:
    """Return the mesh over all data-parallel groups, each divided as `mesh` divides this rank's group."""
    group = group_over(
        sorted(rank for data_parallel_group in data_parallel_groups for rank in data_parallel_group), config.timeout
    )
    _check_backend(group, device)
    own = [int(rank) for rank in mesh.mesh.flatten().tolist()]
    order = sorted(range(len(own)), key=own.__getitem__)  # as process groups number ranks
    within = _topology([own[i] for i in order], shard_groups, config)
    if within.is_hybrid:
        raise ConfigError(
            f"strategy: {config.strategy!r} of parameters that are parallelized over another dimension is not supported; shard "
            "over all data-parallel ranks (strategy='full_shard'), or leave them whole ('no_shard')."
        )
    ranks = dist.get_process_group_ranks(group)
    topology = within.within(
        [[data_parallel_group[i] for i in order] for data_parallel_group in data_parallel_groups], ranks
    )
    return Mesh(group, device, topology, _again(topology, config))


def _again(topology: Topology, config: ShardConfig) -> int | None:
    """Return :attr:`Mesh.secondary_size`."""
    size = config.reshard_after_forward
    if topology.world == 1:
        return None
    if size is not None and topology.size % size:
        raise ConfigError(
            f"reshard_after_forward is {size}, which does not divide the {topology.size} ranks of a copy."
        )
    return None if size == topology.size else size


def _check_backend(group: Any, device: torch.device) -> None:
    if group is not None and not backend_of(group, device.type):
        raise UnavailableError(
            f"the process group ({dist.get_backend_config(group)}) has no backend for tensors on {device.type}: initialise "
            "it with 'cpu:gloo,cuda:nccl', or move the model to a device that it serves."
        )


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


def _chosen(mesh: Any, config: ShardConfig) -> tuple[Any, Sequence[Sequence[int]] | None]:
    """Return the dimensions of a DeviceMesh to shard over, and with two dimensions the global ranks of each replica."""
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
        table = mesh.mesh if names is None or mesh.mesh_dim_names == names else mesh.mesh.T
        return mesh, [[int(rank) for rank in ranks_of_one] for ranks_of_one in table.tolist()]
    if mesh.ndim == 2 and names is not None:
        raise ConfigError(
            f"mesh_dims names two dimensions, {names}, which are copies and slices of a hybrid strategy; strategy is "
            f"{config.strategy!r}."
        )
    raise SetupError(
        f"mesh has {mesh.ndim} dimensions ({mesh.mesh_dim_names}); name the one to shard over, ShardConfig(mesh_dims='name'), "
        "or pass it, mesh['name']. (Two are for strategy='hybrid_shard': copies, and slices.)"
    )


def _of_two_groups(groups: Sequence[Any], config: ShardConfig) -> tuple[Any, Sequence[Sequence[int]]]:
    """Resolve FSDP's pair of process groups: the ranks that share a replica, and the ranks that have the same shard.

    Return a process group over all ranks, and the global ranks of each replica.
    """
    shard, replicate = (_checked_group(group) for group in groups)
    if not config.is_hybrid:
        raise ConfigError(
            f"mesh is a pair of process groups, which a hybrid strategy needs; strategy is {config.strategy!r}."
        )
    # Each replica's rank that has the same shard as this rank tells which ranks share its replica.
    own, others = dist.get_process_group_ranks(shard), dist.get_process_group_ranks(replicate)
    name = f"torch_shard/pair/{replicate.group_name}/{others}"
    _, texts = exchange_texts(others, name, json.dumps(own), config.timeout)
    shard_groups = sorted(json.loads(text) for text in texts.values())
    return group_over(
        sorted(rank for ranks_of_one in shard_groups for rank in ranks_of_one), config.timeout
    ), shard_groups


def _checked_device(device: torch.device) -> torch.device:
    if device.type == "cuda" and torch.cuda.is_available():
        return device if device.index is not None else torch.device("cuda", torch.cuda.current_device())
    if device.type != "cpu":
        there = "" if device.type == "cuda" else "; shards can be on the CPU and on CUDA devices"
        raise SetupError(f"mesh: {device} is no device of this machine's{there}.")
    return torch.device("cpu")


def _device_of(model: nn.Module, group: Any) -> torch.device:
    kinds = {p.device for p in model.parameters() if p.device.type != "meta"}
    accelerated = [d for d in kinds if d.type == "cuda"]
    if accelerated:
        return accelerated[0]
    if group is not None and backend_of(group, "cuda") == "nccl" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def _topology(ranks: Sequence[int], shard_groups: Sequence[Sequence[int]] | None, config: ShardConfig) -> Topology:
    world = len(ranks)
    if config.strategy == "no_shard":
        return Topology.replicated(world)
    if not config.is_hybrid:
        return Topology.sharded(world)
    if world == 1:
        return Topology.sharded(1)
    if shard_groups is not None:
        found = Topology.of_ranks(shard_groups, ranks)
        if config.shard_size not in (None, found.size):
            raise ConfigError(
                f"shard_size is {config.shard_size}, and in the mesh {found.size} ranks share a copy; leave it out."
            )
        return found
    if config.shard_size is not None:
        if world % config.shard_size:
            raise ConfigError(f"shard_size is {config.shard_size}, which does not divide the {world} ranks.")
        return Topology.hybrid(world, config.shard_size)
    return _by_node(ranks)


def _by_node(ranks: Sequence[int]) -> Topology:
    """Return a topology with one replica on each node: launchers number the ranks of a node consecutively."""
    size = int(os.environ.get("LOCAL_WORLD_SIZE", "0")) or (
        torch.cuda.device_count() if torch.cuda.is_available() else 0
    )
    if not size:
        raise ConfigError(
            "shard_size: how many ranks a node has is not known (LOCAL_WORLD_SIZE is not set); pass shard_size=, or a mesh of "
            "two dimensions (copies, and slices)."
        )
    nodes: dict[int, list[int]] = {}
    for rank in ranks:
        nodes.setdefault(rank // size, []).append(rank)
    if len({len(node) for node in nodes.values()}) != 1:
        raise ConfigError(
            f"shard_size: with {size} ranks to a node, the ranks {list(ranks)} are not as many on each; pass shard_size=, or a "
            "mesh of two dimensions (copies, and slices)."
        )
    return Topology.of_ranks(list(nodes.values()), ranks)
