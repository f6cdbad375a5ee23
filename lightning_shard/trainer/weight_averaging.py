"""Averages of the weights: StochasticWeightAveraging, WeightAveraging, EMAWeightAveraging and what is derived from them.

They keep a deep copy of the module, made in their ``setup`` hook, when the module is still plain. In each update they go through
the parameters of both side by side, compute with them element by element, and copy or swap values. The shards of an average are
therefore the averages of the shards: here each rank keeps only its shards of the copy, in ShardTensors that are sharded like the
module's parameters. Everything that the callbacks do works on those as it is, without communication.

A forward of the copy without gradients gathers its weights one by one. The copy stays on the device on which the callback
wants it, and keeps its dtype, which may be another than the module's. When the module becomes plain again, so does the copy.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from torch_shard import Engine, ShardTensor, engine_of
from torch_shard.frontend import (
    abandon,
    broadcast_tensors,
    is_parameter,
    shard_like,
    sharded_alike,
    swap_value,
    with_shard,
)

from .._private import Private, average_of
from ..checkpoint.extra_shards import full_tensor


def copies(callbacks: Iterable[Any], private: Private) -> Iterator[tuple[Any, nn.Module]]:
    """Yield the callbacks that average, each with its copy of the module."""
    for callback in callbacks:
        copy = average_of(callback, private)
        if copy is not None:
            yield callback, copy


def parameters(callbacks: Iterable[Any], private: Private) -> Iterator[torch.Tensor]:
    """Yield the parameters of all averages."""
    for _, copy in copies(callbacks, private):
        yield from copy.parameters()


def check(callbacks: Iterable[Any], module: nn.Module, private: Private) -> None:
    """Raise for callbacks that can't be right, before anything changes. Not collective; the same on all ranks.

    Raises:
        MisconfigurationException: a copy is not one of the module as it is now, or a callback prunes.
    """
    for callback in callbacks:
        if isinstance(callback, private.ModelPruning):
            raise private.MisconfigurationException(
                f"{type(callback).__name__} does not work with ShardStrategy: it replaces sharded parameters during training "
                "(weight becomes weight_orig and a mask). Prune before fit(), with torch.nn.utils.prune on the module: existing "
                "masks stay in force during training."
            )
    for callback, copy in copies(callbacks, private):
        own, copied = _shapes(module), _shapes(copy)
        if own != copied:
            names = sorted({name for name, _ in set(own).symmetric_difference(copied)}) or ["their order"]
            raise private.MisconfigurationException(
                f"{type(callback).__name__} has averaged another module than the one that is run: they differ in "
                f"{', '.join(names[:3])}. It copies the module in its setup hook, before configure_model(), and goes through "
                "the parameters of both in order. Create all layers in __init__, and use a new callback for another module."
            )


def _shapes(module: nn.Module) -> list[tuple[str, torch.Size]]:
    return [(name, p.shape) for name, p in module.named_parameters()]


def shard(callbacks: Iterable[Any], engine: Engine, private: Private) -> None:
    """Shard rank 0's values of the copies, in place, like the module's parameters. Collective.

    A copy on the meta device gets the module's values, buffers included.
    """
    for _, copy in copies(callbacks, private):
        own = engine_of(copy)
        if own is not None:  # the module had stayed sharded when it was copied
            abandon(own)
        for p, like in zip(copy.parameters(), engine.model.parameters(), strict=True):
            if isinstance(like, ShardTensor) and not _is_average(p, like):
                swap_value(p, _sharded(p, like, engine), False)  # else a transfer of weights would be recorded
        _fill_buffers(copy, engine.model)


def _fill_buffers(copy: nn.Module, module: nn.Module) -> None:
    of = dict(module.named_modules(remove_duplicate=False))
    for name, part in copy.named_modules(remove_duplicate=False):
        for key, buffer in part._buffers.items():
            if buffer is not None and buffer.is_meta:
                part._buffers[key] = of[name].get_buffer(key).detach().clone()


def _is_average(p: torch.Tensor, like: ShardTensor) -> bool:
    return isinstance(p, ShardTensor) and not is_parameter(p) and sharded_alike(p, like)


def _copied(p: ShardTensor, like: ShardTensor) -> ShardTensor:
    # Of a clone: once a parameter's own shard has been handed out, the engine expects unseen edits of it.
    copied: Any = p.detach().clone()
    return with_shard(like, copied.to_local())


def _sharded(p: torch.Tensor, like: ShardTensor, engine: Engine) -> ShardTensor:
    """Return this rank's shard of one parameter of a copy, in memory of its own."""
    if p.is_meta:  # the module has got its memory since
        return _copied(like, like)
    if isinstance(p, ShardTensor):
        if sharded_alike(p, like):
            return _copied(p, like)
        full = full_tensor(p, engine.device)
    else:
        # Ranks may have initialised the module differently: shards of different averages would make none.
        full = p.detach().to(engine.device, copy=True, memory_format=torch.contiguous_format)
        broadcast_tensors(engine, [full], "sharding an average of the weights")
    return with_shard(like, shard_like(full, like).to_local().to(p.device))


def unshard(callbacks: Iterable[Any], module: nn.Module, private: Private, device: torch.device) -> None:
    """Make the copies full and plain again, in place. Collective.

    Args:
        callbacks: all callbacks of the Trainer.
        module: the module that was copied, and is plain again.
        private: the private names of Lightning's namespace.
        device: the device over which shards are gathered.
    """
    for _, copy in copies(callbacks, private):
        for p, like in zip(copy.parameters(), module.parameters(), strict=True):
            if isinstance(p, ShardTensor):
                swap_value(p, full_tensor(p, device).to(p.device), like.requires_grad)
