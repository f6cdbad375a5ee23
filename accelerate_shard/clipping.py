"""Clipping any parameters of any number of prepared models, as ``torch.nn.utils`` clips them under DDP."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from torch_shard import Engine
from torch_shard.errors import ShardError
from torch_shard.frontend import clip_together

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
    return clip_together.clip_norm(_engines(models), _listed(parameters), max_norm, norm_type)


def limit_values(models: Iterable[nn.Module], parameters: Any, value: float) -> None:
    """Limit each element of the gradients to ``[-value, value]``. Not collective."""
    clip_together.limit_values(_engines(models), _listed(parameters), value)


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


def _engines(models: Iterable[nn.Module]) -> list[Engine]:
    return [engine for engine in map(engine_of, models) if engine is not None]
