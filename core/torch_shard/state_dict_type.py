"""The form of ``model.state_dict()``, for code written for torch's FullyShardedDataParallel.

In torch a setting on the model determines the form. These are the same functions, with torch's own enumeration and configuration
classes::

    from torch_shard.state_dict_type import FullStateDictConfig, StateDictType, state_dict_type

    with state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(offload_to_cpu=True, rank0_only=True)):
        full = model.state_dict()

By default ``model.state_dict()`` holds ShardTensors that share memory with the parameters, as a plain model's tensors do.
``FULL_STATE_DICT`` and ``SHARDED_STATE_DICT`` give tensors in new memory, as in torch: what is kept of them does not change with
training. ``LOCAL_STATE_DICT`` shares memory, as in torch; its tensors are the ShardTensors, so that
torch.distributed.checkpoint knows which part of the model they are. ``model.load_state_dict`` takes full tensors and
ShardTensors, whatever form is set.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    OptimStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)

from .engine import Engine, engine_of
from .errors import ConfigError
from .state.model_state import copied, make_full

__all__ = [
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "OptimStateDictConfig",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "get_state_dict_type",
    "set_state_dict_type",
    "state_dict_type",
]

_CONFIGS: dict[StateDictType, tuple[type[Any], type[Any]]] = {
    StateDictType.FULL_STATE_DICT: (FullStateDictConfig, FullOptimStateDictConfig),
    StateDictType.SHARDED_STATE_DICT: (ShardedStateDictConfig, ShardedOptimStateDictConfig),
    StateDictType.LOCAL_STATE_DICT: (LocalStateDictConfig, LocalOptimStateDictConfig),
}


def set_state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
) -> StateDictSettings:
    """Set the form of ``module.state_dict()`` and :func:`torch_shard.optim_state.optim_state_dict`.

    This is not collective, but must be done on all ranks. With ``FULL_STATE_DICT`` these functions are collective.

    Args:
        module: a sharded model.
        state_dict_type: the form.
        state_dict_config: an object of the configuration class of that form; None for its defaults.
        optim_state_dict_config: the same for the optimizer.

    Returns:
        The settings that were in force before.

    Raises:
        ConfigError: `module` is not sharded, or a configuration is of another form.
    """
    engine = _engine(module, "set_state_dict_type")
    if state_dict_type not in _CONFIGS:
        raise ConfigError(f"set_state_dict_type: state_dict_type must be a StateDictType, not {state_dict_type!r}.")
    config, optim_config = _CONFIGS[state_dict_type]
    for given, kind in ((state_dict_config, config), (optim_state_dict_config, optim_config)):
        if given is not None and type(given) is not kind:
            raise ConfigError(
                f"set_state_dict_type: {state_dict_type.name} needs a {kind.__name__}, not a {type(given).__name__}."
            )
    before = get_state_dict_type(module)
    settings = StateDictSettings(
        state_dict_type,
        config() if state_dict_config is None else dataclasses.replace(state_dict_config),
        optim_config() if optim_state_dict_config is None else dataclasses.replace(optim_state_dict_config),
    )
    if not any(isinstance(hook, _Convert) for hook in module._state_dict_hooks.values()):
        module.register_state_dict_post_hook(_Convert())
    engine._runtime.state_dict_settings = settings
    return before


def get_state_dict_type(module: nn.Module) -> StateDictSettings:
    """Return the settings. Not collective.

    Raises:
        ConfigError: `module` is not sharded.
    """
    settings: StateDictSettings | None = _engine(module, "get_state_dict_type")._runtime.state_dict_settings
    if settings is not None:
        return settings
    return StateDictSettings(
        StateDictType.SHARDED_STATE_DICT,
        ShardedStateDictConfig(offload_to_cpu=False),
        ShardedOptimStateDictConfig(offload_to_cpu=False),
    )


@contextlib.contextmanager
def state_dict_type(
    module: nn.Module,
    state_dict_type: StateDictType,
    state_dict_config: StateDictConfig | None = None,
    optim_state_dict_config: OptimStateDictConfig | None = None,
) -> Iterator[None]:
    """Set the form for a block, as :func:`set_state_dict_type` does."""
    runtime = _engine(module, "state_dict_type")._runtime
    before = runtime.state_dict_settings
    set_state_dict_type(module, state_dict_type, state_dict_config, optim_state_dict_config)
    try:
        yield
    finally:
        runtime.state_dict_settings = before


_as_shards: contextvars.ContextVar[bool] = contextvars.ContextVar("models give ShardTensors", default=False)


@contextlib.contextmanager
def as_shards() -> Iterator[None]:
    """Make models for which a form is set give ``SHARDED_STATE_DICT`` in this block, whatever that form is."""
    token = _as_shards.set(True)
    try:
        yield
    finally:
        _as_shards.reset(token)


def convert(engine: Engine, found: dict[str, Any], prefix: str) -> None:
    """Convert entries of the engine's model, or of a part of it, to the form that is set. Collective for full tensors."""
    settings: StateDictSettings | None = engine._runtime.state_dict_settings
    if settings is None:
        return
    form, config = settings.state_dict_type, settings.state_dict_config
    if _as_shards.get():
        form, config = StateDictType.SHARDED_STATE_DICT, ShardedStateDictConfig()
    offload = config.offload_to_cpu
    if form is StateDictType.FULL_STATE_DICT:
        rank0_only = cast(FullStateDictConfig, config).rank0_only
        make_full(engine._runtime, found, rank0_only, offload, "model.state_dict", prefix=prefix)
        return
    for key, value in found.items():
        if key.startswith(prefix) and isinstance(value, torch.Tensor):
            if form is StateDictType.SHARDED_STATE_DICT:
                found[key] = copied(value, offload)
            elif offload:
                found[key] = value.detach().cpu()


class _Convert:
    """A post-hook of ``state_dict`` on the sharded model, which converts its result."""

    in_plain_module = None  # it is left out of a pickle

    def __call__(self, module: nn.Module, found: dict[str, Any], prefix: str, metadata: Any) -> None:
        engine = engine_of(module)
        if engine is not None:
            convert(engine, found, prefix)


def _engine(module: nn.Module, what: str) -> Engine:
    engine = engine_of(module)
    if engine is None:
        raise ConfigError(f"{what}: the module is not sharded itself; pass the module that shard() was called with.")
    return engine
