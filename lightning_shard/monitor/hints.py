"""What to change where communication does not hide behind compute: chosen by what the run does, the cheapest first."""

from __future__ import annotations

from typing import Any

import torch

from torch_shard import Engine
from torch_shard.frontend import free_host_bytes

from .metrics import Window, human

__all__ = ["remedies"]

_SHARE_OF_MEMORY = 0.5  # of what is free now
_MANY = 4  # micro-batches of a step


def remedies(engine: Engine, step: Window, trainer: Any) -> list[str]:
    """Settings that would have training wait less, in the order in which to try them. Not collective.

    Args:
        engine: of the model.
        step: the figures of a step like those that wait.
        trainer: whose arguments are looked at.
    """
    config = engine.config
    found: list[str] = []
    gathers = step.gather_wait >= step.reduce_wait
    floats = [
        flat.compute for unit in engine.units for flat in unit.flats if flat.gathers and flat.compute.is_floating_point
    ]
    if any(dtype.itemsize >= 4 for dtype in floats):
        found.append("precision='bf16-mixed', which halves the bytes of gathered parameters")
    if not config.is_hybrid and config.strategy != "no_shard" and trainer.num_nodes > 1:
        found.append("strategy='shard_hybrid', which gathers inside a node and sends gradients alone between nodes")
    if gathers and config.reshards:
        whole = sum(unit.full_bytes for unit in engine.units)
        if _fits(whole, engine.device, trainer.strategy.num_processes):
            name = "shard_hybrid_zero2" if config.is_hybrid else "shard_zero2"
            found.append(
                f"strategy={name!r}, which gathers once a step in place of twice and holds up to {human(whole)}"
            )
        elif config.reshard_after_forward is None and trainer.num_nodes > 1:
            found.append("reshard_after_forward=<ranks of a node>, which has backward's gathers stay inside nodes")
    if gathers and config.prefetch < 2:
        found.append(f"prefetch={config.prefetch + 1} (of ShardStrategy), which gathers further ahead of compute")
    if not gathers and trainer.accumulate_grad_batches >= _MANY:
        found.append("ShardStrategy(defer_gradient_sync=True), which reduces once a step and not at each micro-batch")
    found.append("a larger batch on each rank, with which compute grows and communication does not")
    return found


def _fits(whole: int, device: torch.device, ranks_here: int) -> bool:
    """Whether whole parameters on each rank are likely to fit beside what is there."""
    if device.type == "cuda":
        return whole <= _SHARE_OF_MEMORY * torch.cuda.mem_get_info(device)[0]
    free = free_host_bytes()
    return free is None or whole * max(1, ranks_here) <= _SHARE_OF_MEMORY * free
