"""Is what the user and the cluster say about devices and ranks true? Asked before anything is joined or moved."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from .._private import Shared

__all__ = ["check_devices", "check_ranks", "refuse_interactive"]

_DEVICES = ("cpu", "cuda")  # that the engine shards on


def check_devices(devices: Sequence[torch.device] | None, backend: str | None, private: Shared) -> None:
    """Raise MisconfigurationException where ranks on these devices could not shard, or not talk to each other."""
    for kind in sorted({device.type for device in devices or ()}):
        if kind not in _DEVICES:
            raise private.MisconfigurationException(
                f"strategy='shard' works on CPUs and CUDA devices; the accelerator has {kind} devices. Set "
                "accelerator='cpu' or 'cuda', or another strategy (strategy='auto')."
            )
        if backend is None:
            continue
        serving = _backend_for(kind, backend)
        if serving is None or kind not in dist.Backend.backend_capability.get(serving, [kind]):
            raise private.MisconfigurationException(
                f"process_group_backend={backend!r} does not serve {kind} devices, on which this run is to be. Leave it out, "
                f"or set {dist.Backend.default_device_backend_map[kind]!r}."
            )
        if not dist.is_backend_available(serving):
            raise private.MisconfigurationException(
                f"process_group_backend={backend!r}: this build of torch has no {serving}. Leave it out."
            )


def _backend_for(kind: str, backend: str) -> str | None:
    """The one of ``"cpu:gloo,cuda:nccl"`` for a kind of device; a plain name is for all."""
    if ":" not in backend:
        return backend.lower()
    of_kinds = dict(part.partition(":")[::2] for part in backend.lower().split(","))
    return of_kinds.get(kind)


def refuse_interactive(name: str, private: Shared) -> None:
    """Raise MisconfigurationException in a notebook or at a prompt, where there is no script that other ranks could run."""
    # Lightning refuses it, too, but with the advice to take one of its own strategies.
    if hasattr(sys, "ps1") or sys.flags.interactive:
        raise private.MisconfigurationException(
            f"{name} starts the script once for each rank; an interactive session or notebook has none. Set "
            f"strategy='shard_fork' (or {name}(start_method='fork', ...)) there, or run the code as a script."
        )


def check_ranks(environment: Any, devices: int, nodes: int, private: Shared) -> None:
    """Raise MisconfigurationException where the cluster environment contradicts the run's size, or the process group that exists.

    With another number of ranks than devices * nodes, samples would be dealt out for ranks that don't exist, or for some twice.
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
