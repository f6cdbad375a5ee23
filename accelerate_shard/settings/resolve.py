"""Resolution of the arguments of ``Accelerator(...)`` and of other sources to one :class:`~.plugin.ShardPlugin`.

Settings that select other engines are refused here, before any of Accelerate's state exists.
"""

from __future__ import annotations

import os
from typing import Any

from torch_shard.errors import ConfigError
from torch_shard.log import logger

from .._private import shared_state
from .from_environment import launch_plugin, own_names, take_over_launch
from .from_fsdp import from_fsdp_plugin
from .plugin import ShardPlugin, plugin_of

_SHARED = "shard_plugin"
_enabled: ShardPlugin | None = None  # the argument of `enable(plugin)`

_OTHER_ENGINES = {
    "deepspeed_plugin": "DeepSpeed",
    "deepspeed_plugins": "DeepSpeed",
    "megatron_lm_plugin": "Megatron-LM",
    "torch_tp_plugin": "tensor parallelism through Accelerate",
    "parallelism_config": "Accelerate's ParallelismConfig",
}
_OTHER_VARIABLES = {
    "ACCELERATE_USE_DEEPSPEED": "DeepSpeed",
    "ACCELERATE_USE_MEGATRON_LM": "Megatron-LM",
    "ACCELERATE_USE_PARALLELISM_CONFIG": "Accelerate's ParallelismConfig",
}


def refuse_other_engines(arguments: dict[str, Any]) -> None:
    """Refuse arguments and environment variables that ask for another engine.

    Raises:
        ConfigError: names the setting and the remedy. Not collective.
    """
    for name, engine in _OTHER_ENGINES.items():
        if arguments.get(name) is not None:
            raise ConfigError(
                f"{name}: this Accelerator shards models itself and can't be combined with {engine}. Leave it out; "
                f"shard_plugin=ShardPlugin(...) has the settings of sharding.{_remedy(engine)}"
            )
    precision = arguments.get("mixed_precision") or os.environ.get("ACCELERATE_MIXED_PRECISION", "")
    recipes = [type(h).__name__ for h in arguments.get("kwargs_handlers") or () if "Recipe" in type(h).__name__]
    if str(precision).lower() == "fp8" or recipes:
        raise ConfigError(
            f"{recipes[0] if recipes else 'mixed_precision'}: Accelerate's fp8 replaces layers by ones that are not sharded. "
            "Use mixed_precision='bf16'; ShardPlugin(quantized=...) sends parameters and gradients in 8 bits."
        )
    for name, engine in _OTHER_VARIABLES.items():
        if os.environ.get(name, "").lower() == "true":
            raise ConfigError(
                f"{name}: the launch configuration selects {engine}, which this Accelerator can't be combined with. Launch "
                f"with a configuration without it (`accelerate-shard config` writes one).{_remedy(engine)}"
            )


def _remedy(engine: str) -> str:
    if engine != "DeepSpeed":
        return ""
    return (
        " `accelerate-shard config --deepspeed FILE` translates a YAML for DeepSpeed; docs/accelerate.md has a table of all "
        "keys."
    )


def chosen_plugin(shard_plugin: Any, fsdp_plugin: Any) -> ShardPlugin:
    """Return the settings: the arguments', else the first Accelerator's, else ``enable``'s, else the launch's, else the defaults.

    Afterwards the environment no longer has Accelerate set FSDP up.

    Raises:
        ConfigError: both were given, or one of them is not what its name says. Not collective.
    """
    if fsdp_plugin is not None and shard_plugin is not None:
        raise ConfigError("shard_plugin and fsdp_plugin both say how to shard; give one of them.")
    given = from_fsdp_plugin(fsdp_plugin) if fsdp_plugin is not None else shard_plugin
    # An Accelerator that a library makes takes the program's settings, as with Accelerate's own plugins.
    earlier = shared_state().get(_SHARED)
    if given is None and earlier is not None:
        take_over_launch()
        return earlier
    name = "fsdp_plugin" if fsdp_plugin is not None else "shard_plugin"
    if given is None:
        given, name = _enabled, "enable(plugin)"
    launched = launch_plugin()
    take_over_launch()
    if given is None:
        return launched if launched is not None else ShardPlugin()
    # An FSDP plugin reads the launch's FSDP_* variables itself for arguments that it was not given.
    ignored = own_names() if name == "fsdp_plugin" or launched is None else ["the sharding settings of the launch"]
    if ignored:
        logger.warning("%s is given; not used: %s.", name, ", ".join(ignored))
    return plugin_of(given)


def set_enabled_plugin(plugin: ShardPlugin | None) -> None:
    """Make `plugin` the settings of later Accelerators that are given none. Not collective."""
    global _enabled
    _enabled = plugin


def share(plugin: ShardPlugin) -> None:
    """Make `plugin` the settings of later Accelerators that are given none, if it is the first plugin. Not collective."""
    shared_state().setdefault(_SHARED, plugin)
