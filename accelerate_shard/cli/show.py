"""``accelerate-shard env``: versions, devices, and what a configuration comes to."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import json
import os
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from torch_shard import Offload
from torch_shard.errors import ConfigError
from torch_shard.versions import __version__

from ..settings._private_launch import launch_environment
from ..settings.config_file import FILE_VARIABLE, read_launch_file
from ..settings.from_environment import launch_plugin
from ..settings.plugin import ShardPlugin
from ..settings.resolve import refuse_other_engines

__all__ = ["add_to", "effective"]

_PACKAGES = ("accelerate", "transformers", "peft", "trl", "safetensors")


def add_to(commands: Any) -> None:
    """Add the command to the parser's."""
    parser = commands.add_parser("env", help="print versions, and the settings that a configuration comes to")
    parser.add_argument("--config_file", help="a YAML of Accelerate's; without it the environment counts")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print them."""
    versions = {"torch-shard-engine": __version__, "python": platform.python_version(), "torch": torch.__version__}
    versions |= {name: found for name in _PACKAGES if (found := _version(name)) is not None}
    device = torch.accelerator.current_accelerator()
    devices = "CPU" if device is None else f"{torch.accelerator.device_count()} x {device.type}"
    plugin = effective(arguments.config_file)
    default = ShardPlugin()
    names = [field.name for field in dataclasses.fields(plugin)]
    if arguments.json:
        settings = {name: _plain(getattr(plugin, name)) for name in names}
        print(json.dumps({"versions": versions, "devices": devices, "settings": settings}, indent=2))
        return 0
    for name, version in versions.items():
        print(f"{name:<20}{version}")
    print(f"{'platform':<20}{platform.platform()}")
    print(f"{'devices':<20}{devices}")
    print(f"\nShardPlugin of {arguments.config_file or 'the environment'} (* is not the default)")
    for name in names:
        value = getattr(plugin, name)
        print(f"{'*' if value != getattr(default, name) else ' '} {name:<26}{value!r}")
    return 0


def effective(config_file: str | None, environment: Mapping[str, str] | None = None) -> ShardPlugin:
    """The settings of an Accelerator that is given none, in a process that is launched with this file. Not collective.

    Args:
        config_file: a YAML of Accelerate's; None for the environment as it is.
        environment: that of the launcher; this process's by default.

    Raises:
        ConfigError: as the Accelerator would.
    """
    variables = dict(os.environ if environment is None else environment)
    if config_file is not None:
        read_launch_file(Path(config_file))  # for an error that says what is wrong
        try:
            variables |= launch_environment(config_file)
        except ValueError as error:
            raise ConfigError(f"{config_file}: Accelerate does not take it: {error}") from error
        variables[FILE_VARIABLE] = str(config_file)
    before = dict(os.environ)
    os.environ.clear()
    os.environ.update(variables)
    try:
        refuse_other_engines({})
        return launch_plugin() or ShardPlugin()
    finally:
        os.environ.clear()
        os.environ.update(before)


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _plain(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return [_plain(entry) for entry in value]
    if isinstance(value, Offload):
        return dataclasses.asdict(value)
    return value if value is None or isinstance(value, (bool, int, float, str)) else repr(value)
