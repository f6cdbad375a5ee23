"""Activation checkpointing: layers keep their inputs alone, and compute the rest again in backward.

A layer's ``forward`` is replaced, inside of its hooks: neither a wrapper module, which would change names in state dicts, nor the
hooks that gather a unit, which must not run a second time in backward. That is how transformers checkpoints its own layers; their
``gradient_checkpointing_enable`` is not used, since it covers every layer of the model, some models have none, and in others it
also changes what the model returns. A layer on which the user has switched it on is left to it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from torch_shard import ShardConfig
from torch_shard.errors import ConfigError
from torch_shard.log import logger

from .layers import classes_named, layers_of
from .plugin import ShardPlugin

__all__ = ["checkpointed_layers"]

_CACHES = ("past_key_values", "past_key_value", "layer_past")


@contextlib.contextmanager
def checkpointed_layers(model: nn.Module, plugin: ShardPlugin, config: ShardConfig) -> Iterator[int]:
    """Around the sharding of `model`: the layers that `plugin` chooses recompute their activations from now on.

    Where the body raises they are as they were. Not collective.

    Args:
        config: the engine's settings for this model, whose units ``True`` may mean.

    Yields:
        how many layers.

    Raises:
        ConfigError: the model has no such layers, or one of them has no ``forward``.
    """
    chosen = plugin.activation_checkpointing
    layers = _chosen_layers(model, plugin, config) if chosen else []
    changed = [layer for layer in layers if not isinstance(layer.__dict__.get("forward"), _Recomputed)]
    before = [layer.__dict__.get("forward") for layer in changed]
    for layer in changed:
        layer.forward = _Recomputed(layer, layer.forward)
    try:
        yield len(layers)
    except BaseException:
        for layer, own in zip(changed, before, strict=True):
            if own is None:
                del layer.forward
            else:
                layer.forward = own
        raise


def _chosen_layers(model: nn.Module, plugin: ShardPlugin, config: ShardConfig) -> list[nn.Module]:
    chosen = plugin.activation_checkpointing
    if chosen is True:
        layers = layers_of(model, config, plugin.layer_classes)
    else:
        assert not isinstance(chosen, bool)
        kinds = [entry for entry in chosen if isinstance(entry, type)]
        names = [entry for entry in chosen if isinstance(entry, str)]
        kinds += classes_named("activation_checkpointing", names, model)
        layers = [module for module in model.modules() if isinstance(module, tuple(kinds))]
        if not layers:
            raise ConfigError(
                f"activation_checkpointing: {type(model).__name__} has no module of class "
                f"{', '.join(kind.__name__ for kind in kinds)}."
            )
    outer = _outermost(layers)
    for layer in outer:
        if getattr(type(layer), "forward", None) is nn.Module.forward and "forward" not in layer.__dict__:
            raise ConfigError(
                f"activation_checkpointing: {type(layer).__name__} has no forward; choose the layers in it."
            )
    return outer


def _outermost(layers: list[nn.Module]) -> list[nn.Module]:
    # What is in a recomputed layer would be computed three times.
    inner = {id(module) for layer in layers for module in layer.modules() if module is not layer}
    return [layer for layer in dict.fromkeys(layers) if id(layer) not in inner]


class _Recomputed:
    """A layer's forward with recomputation. An object, since a deep copy of the layer must not share it."""

    def __init__(self, layer: nn.Module, forward: Any) -> None:
        self.layer, self.forward = layer, forward
        functools.update_wrapper(self, forward)  # its signature, for who asks

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        layer = self.layer
        if not (layer.training and torch.is_grad_enabled()) or getattr(layer, "gradient_checkpointing", False):
            return self.forward(*args, **kwargs)
        return checkpoint(functools.partial(self.forward, **_without_cache(kwargs)), *args, use_reentrant=False)


def _without_cache(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Recomputation would write keys and values into the cache a second time, as transformers knows it of its own."""
    changed: dict[str, Any] = {name: None for name in _CACHES if kwargs.get(name) is not None}
    if kwargs.get("use_cache"):
        changed["use_cache"] = False
    if changed:
        _warn_of_caches()
    return {**kwargs, **changed}


@functools.cache
def _warn_of_caches() -> None:
    logger.warning("activation_checkpointing: layers do not use caches of keys and values in training.")
