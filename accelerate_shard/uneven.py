"""Ranks with different numbers of batches: what ``join_uneven_inputs`` does with sharded models.

Under DDP a rank that has no more batches takes part in the reductions of the others. A rank of a sharded model would have to take
part in forwards, clipping and optimizer steps too, none of which it can know. Evaluation needs none of that: with gathered
parameters every rank goes alone.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch.distributed as dist

from torch_shard import Engine
from torch_shard.errors import ConfigError

from .wrapped import engine_of

__all__ = ["even_batches_set", "join"]


@contextlib.contextmanager
def even_batches_set(dataloaders: Iterable[Any], even_batches: bool | None) -> Iterator[None]:
    """Inside, batch samplers make even numbers of batches or not; None leaves them as they are. Not collective."""
    samplers = [] if even_batches is None else [s for s in map(_sampler, dataloaders) if s is not None]
    before = [sampler.even_batches for sampler in samplers]
    for sampler in samplers:
        sampler.even_batches = even_batches
    try:
        yield
    finally:
        for sampler, value in zip(samplers, before, strict=True):
            sampler.even_batches = value


@contextlib.contextmanager
def join(joinables: Iterable[Any], dataloaders: Iterable[Any]) -> Iterator[None]:
    """Inside, ranks may have different numbers of batches if they only evaluate. Collective.

    Args:
        joinables: what the user has named: prepared models.
        dataloaders: the prepared ones; their lengths decide.

    Raises:
        ConfigError: on all ranks: the lengths differ, and one of the models is in training mode.
    """
    models = [(m, e) for m in joinables if (e := engine_of(m)) is not None]
    if not models or not _lengths_differ(dataloaders):
        yield
        return
    for model, _ in models:
        if model.training:
            raise ConfigError(
                "join_uneven_inputs: the ranks have different numbers of batches, and a sharded model is trained by all ranks "
                "together. Leave even_batches at True (the last batches are filled up) or set drop_last=True. In evaluation, "
                "after model.eval(), numbers of batches may differ here."
            )
    with contextlib.ExitStack() as stack:
        for engine in dict.fromkeys(e for _, e in models):
            stack.enter_context(_gathered(engine))
        yield


def _gathered(engine: Engine) -> contextlib.AbstractContextManager[None]:
    return engine.gathered()


def _lengths_differ(dataloaders: Iterable[Any]) -> bool:
    """Collective. Loaders without a length are of iterable datasets, whose batches Accelerate makes even itself."""
    own: list[int] = []
    for loader in dataloaders:
        with contextlib.suppress(TypeError, AttributeError):
            own.append(len(loader))
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return any(lengths != everyone[0] for lengths in everyone)


def _sampler(loader: Any) -> Any:
    sampler = getattr(loader, "batch_sampler", None)
    return sampler if hasattr(sampler, "even_batches") else None
