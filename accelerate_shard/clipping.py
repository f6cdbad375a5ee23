"""Clipping any parameters of any number of prepared models, as ``torch.nn.utils`` clips them under DDP."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from torch_shard import Engine
from torch_shard.errors import ConfigError, ShardError

from .wrapped import engine_of

__all__ = ["clip_norm", "limit_values", "refuse_between_syncs"]


def clip_norm(models: Iterable[nn.Module], parameters: Any, max_norm: float, norm_type: float) -> torch.Tensor:
    """Scale gradients so that their common norm is at most `max_norm`. Collective where one of them is sharded.

    Args:
        models: prepared ones.
        parameters: one, or several, of any of the models, or of none of them.

    Returns:
        The norm before, 0-d, equal on all ranks.

    Raises:
        ConfigError: parameters of several sharded models, with some that ``ShardPlugin.ignore`` leaves out.
    """
    chosen = _listed(parameters)
    engines = _engines_of(models, chosen)
    if len(engines) == 1:
        # Parameters that are not sharded go along: they count with rank 0's gradients, so that all ranks scale alike.
        return engines[0].clip_grad_norm_(max_norm, norm_type, chosen)
    if any(id(p) in ids for ids in map(_ignored, engines) for p in chosen):
        raise ConfigError(
            "clip_grad_norm_: parameters of several models, of which some are left out of sharding (ShardPlugin.ignore). Their "
            "gradients differ between the ranks, which would scale by different factors; clip each model on its own."
        )
    return torch.nn.utils.clip_grad_norm_(chosen, max_norm, norm_type=norm_type)


def limit_values(models: Iterable[nn.Module], parameters: Any, value: float) -> None:
    """Limit each element of the gradients to ``[-value, value]``. Not collective."""
    chosen = _listed(parameters)
    engines = _engines_of(models, chosen)
    if len(engines) == 1:
        engines[0].clip_grad_value_(value, chosen)
    else:
        torch.nn.utils.clip_grad_value_(chosen, value)


def refuse_between_syncs(accelerator: Any, name: str) -> None:
    """Refuse to clip between the micro-batches of an accumulation, where each rank of DDP clips gradients of its own.

    Raises:
        ShardError: on all ranks, before anything has changed.
    """
    state = accelerator.gradient_state
    # With sync_each_batch gradients are the mean over the ranks under DDP, too.
    if accelerator.num_processes == 1 or state.sync_gradients or state.plugin_kwargs.get("sync_each_batch", False):
        return
    raise ShardError(
        f"accelerator.{name} was called while accelerator.sync_gradients is False. DistributedDataParallel clips each rank's own "
        "gradients then; sharded gradients are the mean over the ranks already, so that other numbers would come out. Clip under "
        "`if accelerator.sync_gradients:`, or reduce gradients in each micro-batch with "
        "GradientAccumulationPlugin(sync_each_batch=True)."
    )


def _listed(parameters: Any) -> list[torch.Tensor]:
    return [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)


def _engines_of(models: Iterable[nn.Module], parameters: Sequence[torch.Tensor]) -> list[Engine]:
    """The engines that shard at least one of `parameters`."""
    engines = {id(e): e for e in map(engine_of, models) if e is not None}
    ids = set(map(id, parameters))
    found: list[Engine] = []
    for engine in engines.values():
        if any(id(p) in ids for unit in engine.units for flat in unit.flats for p in flat.params):
            found.append(engine)
    return found


def _ignored(engine: Engine) -> set[int]:
    names = set(engine.plan.ignored)
    return {id(p) for name, p in engine.model.named_parameters() if name in names} if names else set()
