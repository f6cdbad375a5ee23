"""``layer_classes`` and the activation settings of the plugin, as units and as layers that are recomputed."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from contextlib import AbstractContextManager

from torch import nn

from torch_shard import ShardConfig, activation_checkpointing
from torch_shard.frontend import classes_named

from .plugin import ShardPlugin


def with_layer_units(config: ShardConfig, model: nn.Module, names: Sequence[str]) -> ShardConfig:
    """Return `config` with each module of the classes `names` as a unit; `config` itself without names. Not collective.

    Raises:
        ConfigError: the model has no module of such a class.
    """
    if not names:
        return config
    return dataclasses.replace(config, units=classes_named("layer_classes", names, model))


def checkpointed_layers(model: nn.Module, plugin: ShardPlugin, config: ShardConfig) -> AbstractContextManager[int]:
    """Make the layers that `plugin` chooses recompute their activations, and offload their inputs; `model` is sharded inside.

    `config`: the engine's settings for this model. See :func:`torch_shard.activation_checkpointing.checkpointed_layers`.

    Raises:
        ConfigError: the model has no such layers, or one of them has no ``forward``, or keeps no input.
    """
    chosen, offloaded = plugin.activation_checkpointing, plugin.activation_offload
    if plugin.layer_classes:
        named = functools.partial(classes_named, "layer_classes", plugin.layer_classes, model)
        if offloaded is True and not chosen:  # otherwise True means the layers that activation_checkpointing chooses
            offloaded = named()
        if chosen is True:
            chosen = named()
    return activation_checkpointing.checkpointed_layers(model, chosen, config.units, offloaded)
