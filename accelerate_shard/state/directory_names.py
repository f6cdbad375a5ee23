"""Names of checkpoint directories: ``automatic_checkpoint_naming``, the latest checkpoint, and how many are kept."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

from torch_shard.errors import CheckpointError, ConfigError
from torch_shard.frontend.checkpoint import remove
from torch_shard.log import logger

from .files import is_checkpoint

_NAME = re.compile(r"checkpoint_(\d+)")


def _home(accelerator: Any) -> Path:
    if accelerator.project_dir is None:
        raise ConfigError("automatic_checkpoint_naming needs a project_dir: Accelerator(project_dir=...).")
    return Path(os.path.abspath(os.path.join(accelerator.project_dir, "checkpoints")))


def target(accelerator: Any, output_dir: Any) -> Path:
    """Return the folder that ``save_state`` writes.

    Raises:
        ConfigError: there is no place, or ``automatic_checkpoint_naming`` leads to a checkpoint that is there.
    """
    if accelerator.project_configuration.automatic_checkpoint_naming:
        number = accelerator.save_iteration
        folder = _home(accelerator) / f"checkpoint_{number}"
        if accelerator.is_main_process and os.path.lexists(folder):
            raise ConfigError(
                f"Checkpoint directory {folder} ({number}) already exists. Please manually override "
                "`accelerator.project_configuration.iteration` with what iteration to start with."
            )
        return folder
    if output_dir is None:
        raise ConfigError("save_state needs an output_dir, or ProjectConfiguration(automatic_checkpoint_naming=True).")
    return Path(os.path.abspath(os.fspath(output_dir)))


def followed(folder: Path) -> Path:
    """Return the folder to which `folder` leads if it is a link; else `folder` itself. For rank 0.

    A new checkpoint takes the place of what has its name, and would replace the link. Accelerate writes into the linked folder.
    """
    return Path(os.path.realpath(folder)) if folder.is_symlink() else folder


def siblings(accelerator: Any) -> re.Pattern[str] | None:
    """Return a pattern of the names that no other program gives to checkpoints: automatic ones; None without them."""
    return _NAME if accelerator.project_configuration.automatic_checkpoint_naming else None


def source(accelerator: Any, input_dir: Any) -> Path:
    """Return the folder that ``load_state`` reads.

    Raises:
        ConfigError: no folder was named, nor are there automatic names.
        CheckpointError: it does not exist.
    """
    if input_dir is not None:
        folder = Path(os.path.abspath(os.path.expanduser(os.fspath(input_dir))))
        if not folder.is_dir():
            raise CheckpointError(f"Tried to find {folder} but folder does not exist")
        if not is_checkpoint(folder):
            some = ", ".join(sorted(os.listdir(folder))[:3]) or "it is empty"
            raise CheckpointError(f"{folder} is no checkpoint of save_state ({some}).{_hint(folder)}")
        return folder
    if not accelerator.project_configuration.automatic_checkpoint_naming:
        raise ConfigError("No input_dir provided and automatic checkpoint naming is disabled.")
    found = _numbered(_home(accelerator))
    if not found:
        raise CheckpointError(f"there is no checkpoint in {_home(accelerator)}.")
    return found[-1]


def as_named(accelerator: Any, input_dir: Any, folder: Path) -> str:
    """Return the name by which stock Accelerate has the folder that `source` has found; it may be relative."""
    if input_dir is not None:
        return os.path.expanduser(os.fspath(input_dir))
    return os.path.join(accelerator.project_dir, "checkpoints", folder.name)


def _hint(folder: Path) -> str:
    if any(folder.glob("pytorch_model_fsdp*")):
        return (
            " It was written by Accelerate under FSDP; load the model from its folder with "
            "torch_shard.engine_of(model).load(...)."
        )
    deepspeed = (folder / "zero_to_fp32.py").exists() or (folder / "pytorch_model").is_dir()
    return " It was written by DeepSpeed; convert it with its zero_to_fp32.py." if deepspeed else ""


def _numbered(home: Path) -> list[Path]:
    """Return the checkpoints in a folder, the oldest first."""
    names = os.listdir(home) if home.is_dir() else []
    matches = sorted((int(match[1]), name) for name in names if (match := _NAME.fullmatch(name)))
    return [home / name for _, name in matches if (home / name).is_dir()]


def prune(accelerator: Any, folder: Path) -> None:
    """Delete the oldest checkpoints beside `folder`, which is complete, so that ``total_limit`` remain with it. For rank 0."""
    project = accelerator.project_configuration
    if not project.automatic_checkpoint_naming or project.total_limit is None:
        return
    others = [path for path in _numbered(folder.parent) if path != folder]
    for path in others[: max(0, len(others) + 1 - max(1, project.total_limit))]:
        try:
            remove(path)
        except OSError as error:
            logger.warning("%s, beyond total_limit, could not be removed: %s", path, error)
