"""What to change where communication does not hide behind compute."""

from __future__ import annotations

from typing import Any

from torch_shard import Engine
from torch_shard.frontend import format_bytes

from .metrics import Window

_MANY = 4  # micro-batches of a step


def hints(engine: Engine, step: Window, trainer: Any) -> list[str]:
    """Return settings with which training would wait less, in the order in which to try them. Not collective.

    Args:
        engine: the model's engine.
        step: the figures of a step like those that wait.
        trainer: the Trainer whose arguments are looked at.
    """
    config, units = engine.config, engine.plan.units
    found: list[str] = []
    if any(unit.gathered_nbytes >= 4 * unit.numel for unit in units):
        found.append("precision='bf16-mixed', which halves the bytes of gathered parameters")
    if not config.is_hybrid and config.strategy != "no_shard" and trainer.num_nodes > 1:
        found.append("strategy='shard_hybrid', which gathers inside a node and sends gradients alone between nodes")
    if step.gather_wait >= step.reduce_wait:
        if config.reshards:
            name = "shard_hybrid_zero2" if config.is_hybrid else "shard_zero2"
            full = format_bytes(sum(unit.gathered_nbytes for unit in units))
            found.append(
                f"strategy={name!r}, which gathers once a step instead of twice, if {full} fit in the device's memory"
            )
        if config.prefetch < 2:
            found.append(f"prefetch={config.prefetch + 1} (of ShardStrategy), which gathers further ahead of compute")
    elif trainer.accumulate_grad_batches >= _MANY:
        found.append("ShardStrategy(defer_gradient_sync=True), which reduces once a step and not at each micro-batch")
    found.append("a larger batch on each rank, with which compute grows and communication does not")
    return found
