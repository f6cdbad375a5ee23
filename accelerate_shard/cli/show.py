"""``accelerate-shard env``: versions, devices, and the settings of a launch."""

from __future__ import annotations

import argparse
import dataclasses
import importlib.metadata
import os
import platform
from pathlib import Path
from typing import Any

import torch

from torch_shard.errors import ConfigError
from torch_shard.versions import __version__

from ..settings._private_launch import launch_environment
from ..settings.config_file import FILE_VARIABLE, read_launch_file
from ..settings.from_environment import launch_plugin
from ..settings.plugin import ShardPlugin
from ..settings.resolve import refuse_other_engines

_PACKAGES = ("torch", "accelerate", "transformers", "peft", "trl", "safetensors")


def add_to(commands: Any) -> None:
    """Add the command ``env`` to a parser's `commands`."""
    parser = commands.add_parser("env", help="print versions, and the settings that a configuration comes to")
    parser.add_argument("--config_file", help="a YAML of Accelerate's; without it the environment counts")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print versions and settings, and return the exit code."""
    plugin, default = effective(arguments.config_file), ShardPlugin()
    device = torch.accelerator.current_accelerator()
    versions = {"torch-shard-engine": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    versions["devices"] = "CPU" if device is None else f"{torch.accelerator.device_count()} x {device.type}"
    for name, version in versions.items():
        print(f"{name:<20}{version}")
    print(f"\nShardPlugin of {arguments.config_file or 'the environment'} (* is not the default)")
    for field in dataclasses.fields(plugin):
        value = getattr(plugin, field.name)
        print(f"{'*' if value != getattr(default, field.name) else ' '} {field.name:<26}{value!r}")
    return 0


def effective(config_file: str | None) -> ShardPlugin:
    """Return the settings of an Accelerator without arguments, in a process that is launched with this file. Not collective.

    Args:
        config_file: a YAML of Accelerate's; None for the environment as it is.

    Raises:
        ConfigError: the Accelerator would raise it, too.
    """
    before = dict(os.environ)
    try:
        if config_file is not None:
            read_launch_file(Path(config_file))  # raises an error that says what is wrong with the file
            try:
                os.environ.update(launch_environment(config_file))
            except ValueError as error:
                raise ConfigError(f"{config_file}: Accelerate does not take it: {error}") from error
            os.environ[FILE_VARIABLE] = str(config_file)
        refuse_other_engines({})
        return launch_plugin() or ShardPlugin()
    finally:
        os.environ.clear()
        os.environ.update(before)
