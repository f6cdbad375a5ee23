"""The settings that the strategies of the Trainer and of Fabric have in common."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, Literal, TypeAlias

import torch.multiprocessing
from torch import nn

from torch_shard import Offload, Precision, Quantized, ShardConfig
from torch_shard.activation_checkpointing import Layers, checked_layers
from torch_shard.errors import ConfigError
from torch_shard.frontend import group_timeout
from torch_shard.frontend.launch import closest

from .._private import MixinBase, Private
from . import precision as _precision

LayersOrOne: TypeAlias = Layers | type[nn.Module] | str | None
StartMethod = Literal["popen", "spawn", "fork", "forkserver"]
StateDictType = Literal["full", "sharded"]


@dataclass(frozen=True)
class StrategySettings:
    """What ``ShardStrategy`` and ``ShardFabricStrategy`` take by keyword, beside the fields of ``ShardConfig``.

    Args:
        process_group_backend: ``"nccl"`` or ``"gloo"``; by default the device's own.
        timeout: the timeout of the process group, which is also the time that a rank waits for a missing partner before it raises
            :class:`~torch_shard.errors.MissingRankError`; after half a minute a warning says what is waited for. A ``timeout``
            in `config` other than the default fails sooner.
        start_method: ``"popen"`` runs the script once per rank; ``"spawn"`` and ``"fork"`` are for notebooks and tests.
        defer_gradient_sync: while gradients accumulate, reduce them once at the end, which sends less and holds full gradients
            on every rank meanwhile. Otherwise each backward reduces, and gradients accumulate in shards. Off by default under
            the Trainer; on under Fabric, where ``no_backward_sync`` then sends nothing, as with DDP.
        activation_checkpointing: layers that keep only their inputs and compute the rest again in backward: a class or the name
            of one, or several. True chooses those of the modules that are units by `config`, else those that repeat. Names in
            state dicts stay. Batch norms in these layers count each batch twice in their running statistics, as with any
            activation checkpointing.
        activation_offload: layers, chosen in the same way, that compute activations again, too, and whose inputs wait for
            backward in host memory. True chooses the layers that `activation_checkpointing` chooses or, if that is off,
            the layers that ``activation_checkpointing=True`` would choose.
        state_dict_type: ``"full"`` checkpoints are one file each, gathered and written by rank 0, as a single device and
            ``ddp`` write them; ``"sharded"`` ones a directory each, to which every rank writes its shards. Both, and those of
            Lightning's other strategies, are loaded whatever this is.
        async_save: write sharded checkpoints while training goes on. The next save or load waits for the one before and raises
            its failure; the Trainer deletes older checkpoints only when the newer one is complete.
        weights_only: load checkpoints with torch's safe loader or without it, where the call itself does not say. By default
            with the safe loader, which accepts usual hyper-parameters too.

    Raises:
        ConfigError: a setting has a bad value.
    """

    process_group_backend: str | None = None
    timeout: timedelta | None = None
    start_method: StartMethod = "popen"
    defer_gradient_sync: bool = False
    activation_checkpointing: LayersOrOne = None
    activation_offload: LayersOrOne = None
    state_dict_type: StateDictType = "full"
    async_save: bool = False
    weights_only: bool | None = None

    def __post_init__(self) -> None:
        methods = ("popen", *torch.multiprocessing.get_all_start_methods())
        if self.start_method not in methods:
            raise ConfigError(
                f"start_method must be one of {', '.join(map(repr, methods))} on this platform, not {self.start_method!r}."
            )
        if self.timeout is not None and not (isinstance(self.timeout, timedelta) and self.timeout > timedelta(0)):
            raise ConfigError(
                f"timeout must be a positive datetime.timedelta, as in timedelta(minutes=10), not {self.timeout!r}. (The "
                "engine's own time limit, in seconds, is set in a config: ShardConfig(timeout=...).)"
            )
        if self.process_group_backend is not None and not isinstance(self.process_group_backend, str):
            raise ConfigError(
                f"process_group_backend must be a name, such as 'nccl', not {self.process_group_backend!r}."
            )
        if self.state_dict_type not in ("full", "sharded"):
            raise ConfigError(f"state_dict_type must be 'full' or 'sharded', not {self.state_dict_type!r}.")
        if self.async_save and self.state_dict_type == "full":
            raise ConfigError(
                "async_save=True is for state_dict_type='sharded'. Under the Trainer one file is written in the background with "
                "Lightning's plugin: Trainer(plugins=[AsyncCheckpointIO()])."
            )


class SettingsMixin(MixinBase):  # type: ignore[misc]
    """The part of a strategy that keeps what the user has chosen, and makes an engine's settings of it."""

    _private: Private
    _settings: StrategySettings

    def _keep_settings(self, config: ShardConfig | None, given: Mapping[str, Any]) -> None:
        """Check and keep what the user has given by keyword: fields of StrategySettings and of ShardConfig."""
        own = [field.name for field in dataclasses.fields(StrategySettings)]
        self._settings = StrategySettings(**{name: value for name, value in given.items() if name in own})
        self._checkpointed = _chosen_layers(self._settings.activation_checkpointing, "activation_checkpointing")
        self._offloaded = _chosen_layers(self._settings.activation_offload, "activation_offload")
        overrides = {name: value for name, value in given.items() if name not in own}
        self._config = _with_overrides(config, overrides, own, type(self).__name__)
        self._num_nodes = 1
        self._process_group_backend = self._settings.process_group_backend

    def override(self, settings: Mapping[str, Any]) -> None:
        """Change settings of a strategy that has not sharded anything yet. Not collective.

        Args:
            settings: fields of ``ShardConfig``, for which ``timeout`` is the engine's, and of StrategySettings.

        Raises:
            ConfigError: a value is bad.
        """
        fields, own = split_settings(settings)
        if "ignore" in fields:  # beside what the program ignores, whose values may differ between ranks
            fields["ignore"] = (*self._config.ignore, *fields["ignore"])
        kept = {field.name: getattr(self._settings, field.name) for field in dataclasses.fields(StrategySettings)}
        self._keep_settings(dataclasses.replace(self._config, **fields), {**kept, **own})

    @property
    def config(self) -> ShardConfig:
        """The settings that modules are sharded with. ``engine.config`` also has what Lightning says: its precision, the ranks
        of a node and the timeout of the process group."""
        return self._config

    def _engine_config(self, plugin: Any, module: nn.Module) -> ShardConfig:
        """Return the settings of a module's engine under a precision plugin, in the process group that there is."""
        config = _precision.config_for(plugin, self._config, module, self._private)
        changes: dict[str, Any] = {}
        if config.is_hybrid and config.shard_size is None:
            changes["shard_size"] = self.num_processes  # the ranks of a node
        if config.timeout == ShardConfig.timeout:  # not chosen
            # Ranks may be as far apart as under DDP: one may validate, upload or tokenise for minutes.
            changes["timeout"] = group_timeout(self.root_device)
        return dataclasses.replace(config, **changes) if changes else config


def split_settings(settings: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the fields of ``ShardConfig`` among some settings, and those of StrategySettings alone.

    If ``strategy`` is among them, so are the fields that may contradict it: they belong to the strategy that it replaces.
    """
    known = {field.name for field in dataclasses.fields(ShardConfig)}
    fields = {name: value for name, value in settings.items() if name in known}
    if "strategy" in fields:
        fields = {"shard_size": None, "reshard_after_forward": None, **fields}
    return fields, {name: value for name, value in settings.items() if name not in known}


def _chosen_layers(chosen: LayersOrOne, setting: str) -> Layers:
    """Return what a strategy is given as the engine takes it: a single class or name becomes a sequence of one."""
    several = (chosen,) if isinstance(chosen, (str, type)) else False if chosen is None else chosen
    return checked_layers(several, setting)


def _with_overrides(
    config: ShardConfig | None, overrides: Mapping[str, Any], own: list[str], strategy: str
) -> ShardConfig:
    """Return `config`, or the default, with some fields changed; None leaves a field as it is.

    Raises:
        ConfigError: `config` is something else, there is no such field, or its value is bad.
    """
    if not isinstance(config, ShardConfig | None):
        raise ConfigError(
            f"config must be a ShardConfig, not {config!r}: that is the only argument of {strategy} without a name, so write "
            f"{strategy}(accelerator=...), for example, where DDPStrategy takes the accelerator first."
        )
    known = [field.name for field in dataclasses.fields(ShardConfig)]
    unknown = [name for name in overrides if name not in known]
    if unknown:
        close = closest(unknown[0], [*known, *own])
        raise ConfigError(
            f"{unknown[0]}: no such setting; {strategy} and ShardConfig have none of that name. "
            + (f"Did you mean {close}? " if close else "")
            + "docs/lightning.md (Switching over) says what replaces the arguments of Lightning's other strategies."
        )
    chosen = {name: value for name, value in overrides.items() if value is not None}
    return dataclasses.replace(config or ShardConfig(), **chosen)


def same_config(a: ShardConfig, b: ShardConfig) -> bool:
    """Return True if two configurations are equal, without comparing values of parameters in ``ignore``.

    `b` may leave to ``"auto"`` what `a` has.
    """
    if b.strategy == "auto":
        chosen = ("strategy", "memory", "prefetch", "shard_size", "offload")
        b = dataclasses.replace(b, **{name: getattr(a, name) for name in chosen})
    return a is b or all(
        _same(getattr(a, field.name), getattr(b, field.name)) for field in dataclasses.fields(ShardConfig)
    )


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    by_value = (str, int, float, Precision, Quantized, Offload)
    return a is b or (isinstance(a, by_value) and type(a) is type(b) and a == b)
