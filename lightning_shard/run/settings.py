"""The settings that a launch gives: ``SHARD_*`` variables, and arguments ``--shard.*``, which count for more."""

from __future__ import annotations

from collections.abc import MutableMapping, Sequence
from typing import Any, get_args

from torch_shard.frontend.launch import (
    FRONT_END_SETTINGS,
    SETTINGS,
    Setting,
    one_of,
    read_arguments,
    read_variables,
    values_of,
)

from ..strategy.settings import StateDictType

RUNS = "LIGHTNING_SHARD_RUNS"
"""The variable of the environment by which processes that a program starts know that it runs under the runner."""

_ALL = (
    *SETTINGS,
    *FRONT_END_SETTINGS,
    Setting("state_dict_type", one_of(*get_args(StateDictType)), "full or sharded"),
)


def read_settings(arguments: Sequence[str], environment: MutableMapping[str, str]) -> tuple[dict[str, Any], list[str]]:
    """Return the settings by the names of fields, and the arguments behind them. Not collective.

    `environment` gets the arguments as variables.

    Raises:
        ConfigError: a setting is unknown, or its value is wrong or missing.
    """
    given, rest = read_arguments(arguments, _ALL, environment)
    settings = values_of({**read_variables(environment, _ALL), **given})
    if settings.get("timeout", 0) is None:  # as long as the process group waits, which is the default here
        del settings["timeout"]
    return settings, rest
