"""``ShardPlugin``: all settings in one dataclass, as Accelerate's plugins are."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

from torch_shard import ShardConfig
from torch_shard.activation_checkpointing import Layers, checked_layers
from torch_shard.errors import ConfigError

StateDictType = Literal["sharded", "full"]


@dataclass(frozen=True)
class ShardPlugin(ShardConfig):
    """What ``Accelerator(shard_plugin=...)`` does with models: the settings of the engine, and those of this front end.

    Every field of :class:`torch_shard.ShardConfig` is one of this class too. Equal on all ranks; checked on construction.

    Attributes:
        layer_classes: names of the classes of transformer layers, as in ``FSDP_TRANSFORMER_CLS_TO_WRAP``: each such module is a
            unit, and a layer for `activation_checkpointing`. Empty: `units` decides; `activation_checkpointing` takes the classes
            that a transformers model names itself (``_no_split_modules``).
        activation_checkpointing: recompute each layer's activations in backward instead of keeping them. A sequence of
            classes, or of their names, says for which modules; True: for `layer_classes`, else for the modules that `units`
            chooses, else for those that repeat.
        activation_offload: recompute activations, and keep each layer's input in host memory until backward. Classes and names as
            for `activation_checkpointing`. True chooses the layers that it chooses or, if that is off, the layers that
            ``activation_checkpointing=True`` would choose.
        state_dict_type: ``"sharded"``: ``save_state`` writes a folder for each model, to which every rank writes its shards;
            ``"full"``: the files that Accelerate writes under DDP. ``load_state`` loads either form.
        async_save: write ``"sharded"`` checkpoints while training goes on.
        defer_gradient_sync: under ``accumulate`` and ``no_sync``, reduce gradients once at the end. Sends less, but holds the
            full gradients on every rank until then. By default each micro-batch is reduced.
        weights_only: ``load_state`` reads with torch's safe loader, which runs no code from files.
        timeout: seconds that a rank waits for a missing partner before it raises
            :class:`~torch_shard.errors.MissingRankError`; 30, say, to fail fast. None: as long as the process group waits, which
            ``InitProcessGroupKwargs(timeout=...)`` sets, so that ranks may be as far apart as under DDP. After half a minute a
            warning says what is waited for.
        fp32_masters: under mixed precision, keep trainable parameters that are stored in 16 bits in fp32 between steps, as
            Accelerate does under FSDP. By default they are trained as they are stored, as under DDP.

    Raises:
        ConfigError: a value is unknown or of the wrong type; the message starts with the field.

    Not collective.
    """

    timeout: float | None = None  # type: ignore[assignment]
    layer_classes: Sequence[str] = ()
    activation_checkpointing: Layers = False
    activation_offload: Layers = False
    state_dict_type: StateDictType = "sharded"
    async_save: bool = False
    defer_gradient_sync: bool = False
    weights_only: bool = True
    fp32_masters: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        names = self.layer_classes
        if isinstance(names, str) or not all(isinstance(name, str) and name for name in names):
            raise ConfigError(f"layer_classes must be a sequence of names of classes, not {names!r}.")
        object.__setattr__(self, "layer_classes", tuple(names))
        if names and self.units is not None:
            raise ConfigError("layer_classes and units both say what is gathered together; give one of them.")
        for field in ("activation_checkpointing", "activation_offload"):
            object.__setattr__(self, field, checked_layers(getattr(self, field), field))
        if self.state_dict_type not in get_args(StateDictType):
            raise ConfigError(f"state_dict_type must be 'sharded' or 'full', not {self.state_dict_type!r}.")
        for field in ("async_save", "defer_gradient_sync", "weights_only", "fp32_masters"):
            if not isinstance(getattr(self, field), bool):
                raise ConfigError(f"{field} must be True or False, not {getattr(self, field)!r}.")
        if self.async_save and self.state_dict_type == "full":
            raise ConfigError("async_save: only sharded checkpoints are written in the background.")

    def _check_timeout(self) -> None:
        if self.timeout is not None:
            super()._check_timeout()

    def config(self, timeout: float = ShardConfig.timeout) -> ShardConfig:
        """Return the engine's part of the settings, with `timeout`, in seconds, if they say None."""
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(ShardConfig)}
        if self.timeout is None:
            values["timeout"] = timeout
        return ShardConfig(**values)


def plugin_of(setting: Any) -> ShardPlugin:
    """Return the :class:`ShardPlugin` for what the user has given: one, a plain ``ShardConfig``, or None.

    The ``timeout`` of a ``ShardConfig`` counts where it is not the default.

    Raises:
        ConfigError: something else.
    """
    if setting is None:
        return ShardPlugin()
    if isinstance(setting, ShardPlugin):
        return setting
    if isinstance(setting, ShardConfig):
        values = {field.name: getattr(setting, field.name) for field in dataclasses.fields(ShardConfig)}
        if setting.timeout == ShardConfig.timeout:  # the user has not chosen it
            values["timeout"] = None
        return ShardPlugin(**values)
    raise ConfigError(f"shard_plugin must be a ShardPlugin or a ShardConfig, not {type(setting).__name__}.")
