"""Activation checkpointing: layers keep their inputs alone, and compute the rest again in backward.

A layer's ``forward`` is replaced, inside of its hooks: neither a wrapper module, which would change names in state dicts, nor the
hooks that gather a unit, which must not run a second time in backward. That is how transformers checkpoints its own layers; their
``gradient_checkpointing_enable`` is not used, since it covers every layer of the model, some models have none, and in others it
also changes what the model returns. A layer on which the user has switched it on is left to it.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from .config import Units
from .errors import ConfigError
from .layer_classes import classes_named, repeated_layers
from .log import logger

__all__ = ["Layers", "checked_layers", "checkpointed_layers", "keep_activations"]

Layers = bool | Sequence[type[nn.Module] | str]
"""Which layers compute their activations again: classes and names of classes; True: of the units, else those that repeat."""

_CACHES = ("past_key_values", "past_key_value", "layer_past")


def checked_layers(chosen: Any) -> bool | tuple[type[nn.Module] | str, ...]:
    """A user's choice, as a bool or a tuple.

    Raises:
        ConfigError: it is something else than :data:`Layers`.
    """
    if isinstance(chosen, bool):
        return chosen
    entries = None if isinstance(chosen, (str, nn.Module)) or not isinstance(chosen, Iterable) else tuple(chosen)
    if entries is None or not all(
        (isinstance(entry, str) and entry) or (isinstance(entry, type) and issubclass(entry, nn.Module))
        for entry in entries
    ):
        raise ConfigError(
            "activation_checkpointing must be True, False, or a sequence of module classes and names of such, "
            f"not {chosen!r}."
        )
    return entries


@contextlib.contextmanager
def checkpointed_layers(model: nn.Module, chosen: Layers, units: Units) -> Iterator[int]:
    """Around the sharding of `model`: the chosen layers compute their activations again from now on.

    Where the body raises they are as they were. Not collective.

    Args:
        model: whose layers; those inside of a chosen one are computed again with it.
        chosen: classes and names of classes. True: the modules that `units` chooses, else those of the classes that a
            transformers model names itself, else those that repeat in a list.
        units: the engine's setting for this model.

    Yields:
        how many layers.

    Raises:
        ConfigError: the model has no such layers, or one of them has no ``forward``.
    """
    layers = _chosen_layers(model, chosen, units) if chosen else []
    made = [
        _Recomputed(layer, layer.forward)
        for layer in layers
        if not isinstance(layer.__dict__.get("forward"), _Recomputed)
    ]
    for forward in made:
        forward.layer.forward = forward
    try:
        yield len(layers)
    except BaseException:
        for forward in made:
            forward.undo()
        raise


def keep_activations(model: nn.Module) -> None:
    """Undo :func:`checkpointed_layers` in all of `model`. Not collective."""
    for layer in model.modules():
        found = layer.__dict__.get("forward")
        if isinstance(found, _Recomputed):
            found.undo()


def _chosen_layers(model: nn.Module, chosen: Layers, units: Units) -> list[nn.Module]:
    if isinstance(chosen, bool):
        layers = repeated_layers("activation_checkpointing", model, units)
    else:
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
        self.own = "forward" in layer.__dict__  # rather than its class's
        functools.update_wrapper(self, forward)  # its signature, for who asks

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        layer = self.layer
        if not (layer.training and torch.is_grad_enabled()) or getattr(layer, "gradient_checkpointing", False):
            return self.forward(*args, **kwargs)
        return checkpoint(functools.partial(self.forward, **_without_cache(kwargs)), *args, use_reentrant=False)

    def undo(self) -> None:
        if self.own:
            self.layer.forward = self.forward
        else:
            del self.layer.forward


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
