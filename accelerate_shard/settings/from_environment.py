"""The settings of the launch: ``SHARD_*`` variables, ``shard_*`` keys of the YAML, and FSDP's settings, in this order.

An argument to ``Accelerator(...)`` replaces all of them. :func:`take_over_launch` also changes the environment so that Accelerate
does not set FSDP up itself.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, get_args

import torch

from torch_shard.errors import ConfigError
from torch_shard.frontend.launch import (
    FLAG_FORM,
    FRONT_END_SETTINGS,
    PREFIX,
    Setting,
    closest,
    flag,
    names,
    one_of,
    read_value,
    read_variables,
    values_of,
)
from torch_shard.frontend.launch import SETTINGS as ENGINE_SETTINGS
from torch_shard.log import logger

from .config_file import FILE_VARIABLE, launch_file, read_launch_file
from .from_fsdp import KEYS, from_fsdp_environment
from .plugin import ShardPlugin, StateDictType

_TAKEN = "SHARD_FSDP_TAKEN_OVER"
"""Stands for ``ACCELERATE_USE_FSDP``, which Accelerate and transformers must not find: the next Accelerator() and processes that
are started from this one still see that the launch has chosen FSDP."""
_OWN = (FILE_VARIABLE, _TAKEN)
_USE_FSDP = "ACCELERATE_USE_FSDP"
_TRUE = ("1", "true", "yes", "on")


SETTINGS = (
    *ENGINE_SETTINGS,
    *FRONT_END_SETTINGS,
    Setting("layer_classes", names, "names of classes, separated by commas"),
    Setting("fp32_masters", flag, FLAG_FORM),
    Setting("state_dict_type", one_of(*get_args(StateDictType)), "sharded or full"),
)
"""The fields of :class:`ShardPlugin` that the environment and a YAML can set."""

_BY_YAML = {setting.key: setting for setting in SETTINGS}
_FSDP_KEYS = {key.yaml for key in KEYS if key.yaml}


def take_over_launch() -> None:
    """Hide the launch's FSDP from Accelerate and transformers, before an Accelerator is made or a model loaded. Not collective.

    Accelerate would set FSDP up where ``ACCELERATE_USE_FSDP`` is, and transformers would load weights on one rank only. On CPUs
    its launcher starts the processes of an FSDP configuration without telling them to find each other.
    """
    if os.environ.get(_USE_FSDP, "").lower() in _TRUE:
        os.environ[_TAKEN] = "true"
    os.environ.pop(_USE_FSDP, None)
    launched = "LOCAL_RANK" in os.environ and "ACCELERATE_USE_CPU" not in os.environ
    if launched and (_file_settings()[1] or not torch.accelerator.is_available()):
        os.environ["ACCELERATE_USE_CPU"] = "true"


def launch_plugin() -> ShardPlugin | None:
    """Return the settings that the launch has chosen; None if it has chosen none. Not collective.

    Raises:
        ConfigError: names the variable or key, and a close one where it is unknown.
    """
    own = _given()
    fsdp = os.environ.get(_TAKEN) == "true" or os.environ.get(_USE_FSDP, "").lower() in _TRUE
    if not own and not fsdp:
        return None
    base = from_fsdp_environment(os.environ) if fsdp else ShardPlugin()
    changes = values_of(own)
    moved = "units" in changes or "layer_classes" in changes
    if moved and base.activation_checkpointing is True and base.layer_classes:
        # The layers stay the same, whatever the units are.
        changes.setdefault("activation_checkpointing", base.layer_classes)
    # units and layer_classes are one choice: setting one drops the other.
    if "units" in changes and "layer_classes" not in changes:
        changes["layer_classes"] = ()
    elif "layer_classes" in changes and "units" not in changes:
        changes["units"] = None
    try:
        return replace(base, **changes)
    except ConfigError as error:
        names = ", ".join(name for name, _ in own.values())
        raise ConfigError(f"{error} (settings of the launch: {names})") from None


def own_names() -> list[str]:
    """Return the names of the ``SHARD_*`` and ``shard_*`` settings that the launch has chosen. Not collective."""
    return [name for name, _ in _given().values()]


def _given() -> dict[str, tuple[str, Any]]:
    """Return the values of ``SHARD_*`` variables and ``shard_*`` keys by field, each with the name of its variable or key."""
    return {**_file_settings()[0], **read_variables(os.environ, SETTINGS, _OWN)}


def _file_settings() -> tuple[dict[str, tuple[str, Any]], bool]:
    """Return the values of the YAML's ``shard_*`` keys by field, each with its key, and the YAML's ``use_cpu``."""
    path = launch_file()
    if path is None:
        return {}, False
    contents = read_launch_file(path)
    section = contents.get("fsdp_config")
    found, unknown = {}, []
    for key, value in (section if isinstance(section, Mapping) else {}).items():
        setting = _BY_YAML.get(key)
        if setting is not None:
            found[setting.field] = (key, read_value(setting, f"{path}: {key}", value))
        elif str(key).startswith(PREFIX.lower()):
            close = closest(key, _BY_YAML)
            hint = f" Did you mean {close}?" if close else ""
            raise ConfigError(f"{path}: fsdp_config has the key {key}, which is no setting of this package.{hint}")
        elif key not in _FSDP_KEYS and f"fsdp_{key}" not in _FSDP_KEYS:
            close = closest(key, _FSDP_KEYS)
            unknown.append(f"{key} (did you mean {close}?)" if close else str(key))
    if unknown:
        logger.warning("%s: fsdp_config has keys that nothing reads: %s.", path, ", ".join(unknown))
    return found, contents.get("use_cpu") is True
