"""Activation checkpointing: layers keep only their inputs, and recompute the rest in backward.

A layer's ``forward`` is replaced, inside of its hooks. A wrapper module would change names in state dicts, and the hooks that
gather a unit must not run a second time in backward. transformers checkpoints its own layers in the same way; its
``gradient_checkpointing_enable`` is not used, since it covers every layer of the model, some models have none, and in others it
also changes what the model returns. A layer on which the user has switched that on is left to it.

The inputs of chosen layers wait for backward in host memory: :mod:`.activation_offload`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from .activation_offload import ActivationOffload
from .config.checks import checked_modules
from .config.shard_config import Units
from .errors import ConfigError
from .plan.layer_selection import classes_named, outermost, repeated_layers
from .schedule.kept_inputs import checkpoint_keeping
from .utils.layer_caches import without_cache

__all__ = [
    "Layers",
    "checked_layers",
    "checkpointed_layers",
    "has_checkpointed_layers",
    "keep_activations",
    "offload_of",
]

Layers = bool | Sequence[type[nn.Module] | str]
"""The layers that recompute: classes and names of classes. True: the layers of the units, else those that repeat."""


def checked_layers(chosen: Any, setting: str = "activation_checkpointing") -> bool | tuple[type[nn.Module] | str, ...]:
    """Return a user's choice of layers as a bool or a tuple. `setting` is its name, for the message.

    Raises:
        ConfigError: `chosen` is not a :data:`Layers`.
    """
    return chosen if isinstance(chosen, bool) else checked_modules(setting, chosen)


@contextlib.contextmanager
def checkpointed_layers(model: nn.Module, chosen: Layers, units: Units, offloaded: Layers = False) -> Iterator[int]:
    """Make the chosen layers recompute their activations from now on. Enter it around the sharding of `model`.

    If the body raises, the layers are as they were. Not collective.

    Args:
        model: the model that has the layers; layers inside of a chosen one are recomputed with it.
        chosen: classes and names of classes. True: the modules that `units` chooses, else those of the classes that a
            transformers model names itself, else those that repeat in a list.
        units: the engine's setting for this model.
        offloaded: layers that recompute their activations, whether `chosen` says so or not, and whose inputs wait for
            backward in host memory (:class:`~torch_shard.activation_offload.ActivationOffload`). True: all that are `chosen`;
            if none are, those that ``chosen=True`` means.

    Yields:
        The number of layers.

    Raises:
        ConfigError: the model has no such layers, one of them has no ``forward``, or one of `offloaded` has inputs
            that nothing keeps: it is inside of a layer that is recomputed, or the model's own ``gradient_checkpointing`` is on.
    """
    layers = _chosen_layers("activation_checkpointing", model, chosen, units) if chosen else []
    moved: list[nn.Module] = []
    if offloaded is True and layers:
        moved = layers
    elif offloaded:
        moved = _chosen_layers("activation_offload", model, offloaded, units)
        layers = outermost(layers + moved)
    _refuse_without_inputs(moved, layers)
    before = [(layer, layer.__dict__.get("forward")) for layer in layers]
    offload = ActivationOffload() if moved else None
    for layer, forward in before:
        recomputed = forward if isinstance(forward, _Recomputed) else _Recomputed(layer, layer.forward)
        layer.forward = (
            recomputed if layer not in moved else _Recomputed(layer, recomputed.forward, recomputed.own, offload)
        )
    try:
        yield len(layers)
    except BaseException:
        for layer, forward in before:
            _set_forward(layer, forward)
        raise


def keep_activations(model: nn.Module) -> None:
    """Undo :func:`checkpointed_layers` in all of `model`. Not collective."""
    for layer in model.modules():
        found = layer.__dict__.get("forward")
        if isinstance(found, _Recomputed):
            found.undo()


def has_checkpointed_layers(model: nn.Module) -> bool:
    """Return True if layers of `model` recompute, as :func:`checkpointed_layers` has made them do. Not collective."""
    return any(isinstance(layer.__dict__.get("forward"), _Recomputed) for layer in model.modules())


def offload_of(model: nn.Module) -> ActivationOffload | None:
    """Return the object that moves inputs of layers of `model` and counts the bytes, or None. Not collective."""
    found = (layer.__dict__.get("forward") for layer in model.modules())
    return next((f.offload for f in found if isinstance(f, _Recomputed) and f.offload is not None), None)


def _chosen_layers(setting: str, model: nn.Module, chosen: Layers, units: Units) -> list[nn.Module]:
    if isinstance(chosen, bool):
        layers = repeated_layers(setting, model, units)
    else:
        kinds = [entry for entry in chosen if isinstance(entry, type)]
        names = [entry for entry in chosen if isinstance(entry, str)]
        kinds += classes_named(setting, names, model)
        layers = [module for module in model.modules() if isinstance(module, tuple(kinds))]
        if not layers:
            raise ConfigError(
                f"{setting}: {type(model).__name__} has no module of class {', '.join(kind.__name__ for kind in kinds)}."
            )
    outer = outermost(layers)
    for layer in outer:
        if getattr(type(layer), "forward", None) is nn.Module.forward and "forward" not in layer.__dict__:
            raise ConfigError(f"{setting}: {type(layer).__name__} has no forward; choose the layers in it.")
    return outer


def _refuse_without_inputs(moved: list[nn.Module], layers: list[nn.Module]) -> None:
    for layer in moved:
        name = type(layer).__name__
        if layer not in layers:
            outer = next(type(o).__name__ for o in layers if any(module is layer for module in o.modules()))
            raise ConfigError(
                f"activation_offload: {name} is inside of {outer}, which activation_checkpointing computes again as a whole, so "
                f"that nothing of {name} is kept. Choose {outer} for activation_offload, or leave it out of "
                "activation_checkpointing."
            )
        if getattr(layer, "gradient_checkpointing", False):
            raise ConfigError(
                f"activation_offload: {name} has the model's own gradient_checkpointing switched on, which keeps the layer's "
                "inputs itself. Leave that out (gradient_checkpointing=True, gradient_checkpointing_enable()): "
                "activation_offload computes activations again, too."
            )


class _Recomputed:
    """A layer's forward with recomputation: an object, not a closure, since a deep copy of the layer must have its own."""

    def __init__(
        self, layer: nn.Module, forward: Any, own: bool | None = None, offload: ActivationOffload | None = None
    ) -> None:
        self.layer, self.forward, self.offload = layer, forward, offload
        self.own = "forward" in layer.__dict__ if own is None else own  # an instance attribute, not its class's
        functools.update_wrapper(self, forward)  # for callers of inspect.signature

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        layer = self.layer
        if not (layer.training and torch.is_grad_enabled()) or getattr(layer, "gradient_checkpointing", False):
            return self.forward(*args, **kwargs)
        kwargs = without_cache(layer, kwargs)
        if self.offload is None:
            return checkpoint(functools.partial(self.forward, **kwargs), *args, use_reentrant=False)
        call = _offloaded_uncompiled if torch.compiler.is_compiling() else checkpoint_keeping
        return call(self.offload, self.forward, args, kwargs)

    @property
    def in_plain_module(self) -> Any:
        """The layer's forward without recomputation, for pickles of the layer; None: its class's."""
        return self.forward if self.own else None

    def undo(self) -> None:
        _set_forward(self.layer, self.in_plain_module)


def _set_forward(layer: nn.Module, forward: Any) -> None:
    """Give a layer a forward of its own; with None, that of its class."""
    if forward is not None:
        layer.forward = forward
    else:
        layer.__dict__.pop("forward", None)


# Like `forward_hooks.uncompiled`, this uses private names of torch (2.13).
_offloaded_uncompiled: Any = torch._disable_dynamo(checkpoint_keeping)  # type: ignore[attr-defined]
_offloaded_uncompiled._torchdynamo_disable = True
_offloaded_uncompiled._torchdynamo_disable_msg = (
    "activation_offload: compiled code keeps the inputs of layers itself, so that these layers run between graphs. Leave out "
    "fullgraph=True, and compile what is in the layers: layer.forward = torch.compile(layer.forward) before sharding"
)
