"""Checks of what the user and the cluster say about devices and ranks, before anything is joined or moved."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from .._private import Private

_DEVICES = ("cpu", "cuda")  # where the engine can shard


def check_devices(devices: Sequence[torch.device] | None, private: Private) -> None:
    """Raise MisconfigurationException if ranks on these devices can't shard."""
    for kind in sorted({device.type for device in devices or ()}):
        if kind not in _DEVICES:
            raise private.MisconfigurationException(
                f"strategy='shard' works on CPUs and CUDA devices; the accelerator has {kind} devices. Set "
                "accelerator='cpu' or 'cuda', or another strategy (strategy='auto')."
            )


def check_ranks(environment: Any, devices: int, nodes: int, private: Private) -> None:
    """Raise MisconfigurationException if the cluster environment contradicts the run's size or the existing process group.

    With another number of ranks than devices * nodes, samplers would give samples to ranks that don't exist, or give some twice.
    """
    name, size = type(environment).__name__, devices * nodes
    stated = f"devices={devices} and num_nodes={nodes} make {size} rank(s)"
    remedy = "Set devices (on each node) and num_nodes to what the job was started with."
    world, rank, local = environment.world_size(), environment.global_rank(), environment.local_rank()
    if world != size:
        raise private.MisconfigurationException(f"{name} says that there are {world} ranks, but {stated}. {remedy}")
    if not 0 <= rank < size or not 0 <= local < devices:
        raise private.MisconfigurationException(
            f"{name} says that this is rank {rank}, the one with number {local} on its node, but {stated}. {remedy}"
        )
    if dist.is_initialized() and (dist.get_world_size() != size or dist.get_rank() != rank):
        raise private.MisconfigurationException(
            f"this process is rank {dist.get_rank()} of {dist.get_world_size()} in the process group that exists, but "
            f"{name} says rank {rank} of {size}. {remedy}"
        )
