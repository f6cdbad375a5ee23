"""``accelerate-shard test``: a short training on the chosen set-up, as a user's would be launched."""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from torch_shard.errors import ConfigError

from ..settings.config_file import FILE_VARIABLE, read_launch_file
from .config import DEFAULT_FILE
from .show import effective

__all__ = ["add_to"]

_GOOD, _BAD = 0, 1


def add_to(commands: Any) -> None:
    """Add the command to the parser's."""
    parser = commands.add_parser("test", help="train a small model with a configuration, and compare the ranks")
    parser.add_argument(
        "--config_file", default=DEFAULT_FILE, help=f"a YAML of Accelerate's; {DEFAULT_FILE} by default"
    )
    parser.add_argument(
        "--timeout", type=float, default=600.0, help="seconds until it counts as hanging; 600 by default"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Launch the training; 0 where the ranks agree."""
    path = Path(arguments.config_file)
    if not path.is_file():
        raise ConfigError(f"there is no file {path}; `accelerate-shard config` writes one.")
    effective(str(path))  # a mistake in the settings shows here, before processes are started
    processes = read_launch_file(path).get("num_processes", 1)
    command = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", str(path)]
    command += ["-m", "accelerate_shard.cli.training", str(processes)]
    variables = {**os.environ, FILE_VARIABLE: str(path.resolve())}
    try:
        done = subprocess.run(command, env=variables, timeout=arguments.timeout)
    except subprocess.TimeoutExpired:
        print(f"accelerate-shard: no result after {arguments.timeout:g} s; stopped.", file=sys.stderr)
        return _BAD
    if done.returncode != 0:
        print("accelerate-shard: the test failed; what the ranks said is above.", file=sys.stderr)
        return _BAD
    return _GOOD
