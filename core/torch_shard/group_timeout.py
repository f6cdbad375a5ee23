"""How long a process group waits, which front ends take for the engine's limit where the user has chosen none."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

__all__ = ["group_timeout"]


def group_timeout(device: torch.device) -> float:
    """Seconds that collectives on `device` wait in the default process group; torch's default where it does not say."""
    c10d: Any = dist.distributed_c10d
    if not (dist.is_available() and dist.is_initialized()):
        return float(c10d.default_pg_timeout.total_seconds())
    group: Any = dist.group.WORLD
    try:
        timeout = group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):  # of a backend that has no such options, or none for this device
        timeout = c10d._get_default_timeout(c10d.Backend(dist.get_backend(group)))
    return float(timeout.total_seconds())
