"""The YAML that ``accelerate launch`` was started with. The launcher does not tell its processes where it is.

The launcher exports the settings that it knows, and silently drops other keys of ``fsdp_config``: our ``shard_*`` keys, and
misspelt ones. They are read here from the file, which is found by :data:`FILE_VARIABLE` or in the launcher's command line.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

from torch_shard.errors import ConfigError

from ._private_launch import parsed_launch

FILE_VARIABLE = "SHARD_CONFIG_FILE"
"""Environment variable with the path of the YAML, for launchers whose command line can't be seen (another container, say)."""

_LAUNCHED = "ACCELERATE_MIXED_PRECISION"  # every launcher of Accelerate exports it
# The number of parents to look at: torchrun's agent is Accelerate's own process, but MPI and shells come between.
_GENERATIONS = 4


def launch_file() -> Path | None:
    """Return the path of the YAML of this launch; None if this process was not launched with one. Not collective.

    Raises:
        ConfigError: :data:`FILE_VARIABLE` names no file.
    """
    named = os.environ.get(FILE_VARIABLE)
    if named:
        if not Path(named).is_file():
            raise ConfigError(f"{FILE_VARIABLE}: there is no file {named!r}.")
        return Path(named)
    return _of_parents() if _LAUNCHED in os.environ else None


def _of_parents() -> Path | None:
    import psutil  # Accelerate depends on it

    with contextlib.suppress(psutil.Error, OSError):
        for parent in psutil.Process().parents()[:_GENERATIONS]:
            arguments = _launch_arguments(parent.cmdline())
            if arguments is None:
                continue
            options = parsed_launch(arguments)
            if options is None:  # the command line of another version
                return None
            if options.config_file is not None:
                path = Path(parent.cwd(), os.path.expanduser(options.config_file))
                return path if path.is_file() else None
            from accelerate.commands.config.config_args import default_config_file

            return Path(default_config_file) if not options.cpu and Path(default_config_file).is_file() else None
    return None


def _launch_arguments(command: list[str]) -> list[str] | None:
    """Return the arguments of ``accelerate launch`` in a command line; None if it is another command."""
    for index, word in enumerate(command[:4]):  # the interpreter, its -m, ...
        program, rest = Path(word).name, command[index + 1 :]
        launches = program == "accelerate-launch" or word == "accelerate.commands.launch"
        if launches or word.endswith("commands/launch.py"):
            return rest
        if (program == "accelerate" or word == "accelerate.commands.accelerate_cli") and rest[:1] == ["launch"]:
            return rest[1:]
    return None


def read_launch_file(path: Path) -> dict[str, Any]:
    """Return the contents of a YAML or JSON file of Accelerate's. Not collective.

    Raises:
        ConfigError: the file can't be read, or holds no mapping.
    """
    import yaml  # JSON is YAML

    try:
        contents = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise ConfigError(f"{path} can't be read: {error}.") from error
    if not isinstance(contents, dict):
        raise ConfigError(f"{path} is no configuration of Accelerate: it holds no mapping.")
    return contents
