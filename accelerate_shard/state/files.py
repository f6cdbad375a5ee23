"""Files of a checkpoint: their names, how they are read, and which stay when a checkpoint is replaced."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path
from typing import Any

from accelerate.utils import load as accelerates_load
from accelerate.utils.constants import (
    MODEL_NAME,
    OPTIMIZER_NAME,
    RNG_STATE_NAME,
    SAFE_MODEL_NAME,
    SAMPLER_NAME,
    SCALER_NAME,
    SCHEDULER_NAME,
)

from torch_shard.errors import CheckpointError
from torch_shard.frontend.checkpoint import read_pickled, refuse_damaged

SHARDED = "sharded"
"""The folder in a checkpoint that all ranks write."""

CUSTOM = re.compile(r"custom_checkpoint_\d+\.pkl")

_WEIGHTS = re.compile(rf"({SAFE_MODEL_NAME}(_\d+)?\.safetensors|{MODEL_NAME}(_\d+)?\.bin)")
_REST = re.compile(
    rf"({OPTIMIZER_NAME}|{SCHEDULER_NAME}|{SAMPLER_NAME}|dl_state_dict)(_\d+)?\.bin|{re.escape(SCALER_NAME)}"
    rf"|{RNG_STATE_NAME}_\d+\.pkl|{CUSTOM.pattern}|{SHARDED}"
)
_RANDOM = re.compile(rf"{RNG_STATE_NAME}_(\d+)\.pkl")


def numbered(name: str, number: int, suffix: str = ".bin") -> str:
    """Return the file name of the object of this number: the first has none in its name."""
    return f"{name}{suffix}" if number == 0 else f"{name}_{number}{suffix}"


def weights_name(number: int, safe: bool) -> str:
    """Return the name of the file that a model is written to."""
    return numbered(SAFE_MODEL_NAME, number, ".safetensors") if safe else numbered(MODEL_NAME, number)


def model_file(folder: Path, number: int) -> Path | None:
    """Return the file, or the index of files, that holds a model; None if there is none."""
    names = [weights_name(number, True), weights_name(number, False)]
    if number == 0:
        names.insert(1, f"{SAFE_MODEL_NAME}.safetensors.index.json")
    return next((folder / name for name in names if (folder / name).is_file()), None)


def random_states(folder: Path) -> dict[int, str]:
    """Return the names of the files with the random states, by rank."""
    found = ((_RANDOM.fullmatch(name), name) for name in os.listdir(folder))
    return {int(match[1]): name for match, name in found if match is not None}


def is_checkpoint(folder: Path) -> bool:
    """Return True if a folder holds what ``save_state`` writes, here or in stock Accelerate."""
    return folder.is_dir() and any(_REST.fullmatch(name) or _WEIGHTS.fullmatch(name) for name in os.listdir(folder))


def keep_others(old: Path, new: Path) -> None:
    """Put the files of the folder `old` that are no parts of a checkpoint into `new`, too, which keeps what it has already."""
    if not old.is_dir():
        return
    names = sorted(os.listdir(old))
    parts = any(_REST.fullmatch(name) for name in names)
    for name in names:
        # Weights in the folder of a sharded checkpoint are not the checkpoint's: they may be an export.
        ours = parts and (_REST.fullmatch(name) or (SHARDED not in names and _WEIGHTS.fullmatch(name)))
        if ours or os.path.lexists(new / name):
            continue
        path = old / name
        if path.is_dir() and not path.is_symlink():
            shutil.copytree(path, new / name, symlinks=True, copy_function=_linked)
        else:
            _linked(str(path), str(new / name))


def _linked(source: str, target: str) -> str:
    """Link one file under two names: a program that has it open goes on writing to both."""
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # a file system without links
        shutil.copy2(source, target, follow_symlinks=False)
    return target


def read(path: Path, weights_only: bool, share: tuple[int, int] = (0, 1), **options: Any) -> Any:
    """Return what a pickled file holds, on the CPU unless `options` (of ``torch.load``) say otherwise. Not collective.

    Args:
        path: the file.
        weights_only: read with torch's safe loader, which runs no code.
        share: this rank and the number of ranks that divide the comparison with the file's checksums among them; each rank
            compares all by default.

    Raises:
        CheckpointError: it is missing, damaged, or holds what the safe loader refuses.
    """
    if not path.is_file():
        raise CheckpointError(f"{path} is missing: the checkpoint is incomplete, or of a run with other objects.")
    refuse_damaged(path, *share)
    options = {"map_location": "cpu", **options, "weights_only": weights_only}
    remedy = "ShardPlugin(weights_only=False) or load_state(..., load_kwargs={'weights_only': False})"
    return read_pickled(lambda: accelerates_load(path, **options), path, remedy)
