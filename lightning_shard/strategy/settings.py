"""The settings that the strategies of the Trainer and of Fabric have in common."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeAlias

from torch import nn

from torch_shard import Offload, Precision, Quantized, ShardConfig
from torch_shard.activation_checkpointing import Layers, checked_layers
from torch_shard.errors import ConfigError
from torch_shard.frontend import group_timeout

from .._private import Shared
from ..checkpoint.save import StateDictType, check_form
from . import precision as _precision
from .environment import check_start_settings
from .processes import StartMethod

if TYPE_CHECKING:
    _Base: TypeAlias = Any
else:
    _Base = object

__all__ = ["LayersOrOne", "SettingsMixin", "same_config", "with_overrides"]

LayersOrOne: TypeAlias = Layers | type[nn.Module] | str | None
"""What strategies take as ``activation_checkpointing`` and ``activation_offload``."""


class SettingsMixin(_Base):  # type: ignore[misc]
    """Keeps what the user has chosen, and makes of it what an engine gets."""

    _private: Shared

    def _keep_settings(
        self,
        config: ShardConfig | None,
        overrides: Mapping[str, Any],
        *,
        process_group_backend: str | None,
        timeout: timedelta | None,
        start_method: StartMethod,
        defer_gradient_sync: bool,
        activation_checkpointing: LayersOrOne,
        activation_offload: LayersOrOne,
        state_dict_type: StateDictType,
        async_save: bool,
        weights_only: bool | None,
    ) -> None:
        """Check and keep the arguments that both strategies take."""
        check_start_settings(start_method, timeout, process_group_backend)
        self._config = with_overrides(config, overrides, type(self).__name__)
        self._checkpointed = chosen_layers(activation_checkpointing, "activation_checkpointing")
        self._offloaded = chosen_layers(activation_offload, "activation_offload")
        check_form(state_dict_type, async_save)
        self._num_nodes = 1
        self._process_group_backend = process_group_backend
        self._timeout = timeout or self._private.default_pg_timeout
        self._start_method = start_method
        self._defer_gradient_sync = defer_gradient_sync
        self._state_dict_type = state_dict_type
        self._async_save = async_save
        self._weights_only = weights_only

    @property
    def config(self) -> ShardConfig:
        """What modules are sharded with, but for what Lightning says: its precision, the ranks of a node and the timeout of the
        process group are in ``engine.config``."""
        return self._config

    def _engine_config(self, plugin: Any, module: nn.Module) -> ShardConfig:
        """The settings of a module's engine under a precision plugin, in the process group that there is. Not collective."""
        config = _precision.config_for(plugin, self._config, module, self._private)
        changes: dict[str, Any] = {}
        if config.is_hybrid and config.shard_size is None:
            changes["shard_size"] = self.num_processes  # the ranks of a node
        if config.timeout == ShardConfig.timeout:  # not chosen
            # Ranks may be as far apart as under DDP: one may validate, upload or tokenise for minutes.
            changes["timeout"] = group_timeout(self.root_device)
        return dataclasses.replace(config, **changes) if changes else config


def chosen_layers(chosen: LayersOrOne, setting: str) -> Layers:
    """What a strategy is given as the engine takes it: a single class or name stands for a sequence of one.

    Raises:
        ConfigError: it is something else.
    """
    several = (chosen,) if isinstance(chosen, (str, type)) else False if chosen is None else chosen
    return checked_layers(several, setting)


def with_overrides(config: ShardConfig | None, overrides: Mapping[str, Any], strategy: str) -> ShardConfig:
    """`config`, or the default, with some fields changed; None leaves a field as it is.

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
        close = difflib.get_close_matches(unknown[0], known, 1)
        raise ConfigError(
            f"{unknown[0]}: no such setting; {strategy} and ShardConfig have none of that name. "
            + (f"Did you mean {close[0]}? " if close else "")
            + "docs/lightning.md (Switching over) says what stands for the arguments of Lightning's other strategies."
        )
    chosen = {name: value for name, value in overrides.items() if value is not None}
    return dataclasses.replace(config or ShardConfig(), **chosen)


def same_config(a: ShardConfig, b: ShardConfig) -> bool:
    # Not a == b: `ignore` may hold parameters, and comparing those compares values.
    return a is b or all(
        _same(getattr(a, field.name), getattr(b, field.name)) for field in dataclasses.fields(ShardConfig)
    )


def _same(a: Any, b: Any) -> bool:
    if isinstance(a, tuple) and isinstance(b, tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    by_value = (str, int, float, Precision, Quantized, Offload)
    return a is b or (isinstance(a, by_value) and type(a) is type(b) and a == b)
