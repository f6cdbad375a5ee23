"""A checkpoint as one file of torch.save, or as safetensors. One tensor is in memory at a time."""

from __future__ import annotations

import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from ..full.output import safetensors_output, torch_output
from ..sharded.entry_tree import Stored
from .classify import Parts
from .open_any import Opened
from .torch_layout import Slots, torch_structure

__all__ = ["write_safetensors", "write_torch"]

Progress = Callable[[int], object]


def write_torch(
    opened: Opened,
    parts: Parts,
    target: Path,
    progress: Progress = lambda nbytes: None,
) -> None:
    """Write a file that ``torch.load(weights_only=True)`` reads; see :mod:`.torch_layout` for what is in it.

    Args:
        opened, parts: the checkpoint.
        target: of the file, which appears when it is complete.
        progress: is told of bytes as they are read.

    Raises:
        CheckpointError: an entry is damaged, or can't be unpickled without running code.
        OSError: the disk is full, for instance; nothing is left then.
    """
    slots = Slots()
    structure = torch_structure(parts, slots, opened.module_versions)
    with torch_output(target, secrets.token_hex(8), structure) as output:
        for slot, stored in slots.of:
            output.write(slot, stored.read())
            progress(stored.nbytes)
        output.commit()


def write_safetensors(
    parts: Parts,
    target: Path,
    *,
    max_shard_size: int = 5 * 10**9,
    progress: Progress = lambda nbytes: None,
) -> list[str]:
    """Write the models of a checkpoint; the format has nothing but named tensors.

    Args:
        parts: of the checkpoint.
        target: one file if it ends in ``.safetensors``, else a directory for ``model.safetensors``, or several and their index.
        max_shard_size: bytes in one file of a directory; one file is in memory at a time.
        progress: is told of bytes as they are read.

    Returns:
        The names of entries of the models that are left out, since they are no tensors.

    Raises:
        CheckpointError: an entry is damaged, or of a dtype that the format does not have.
        UnavailableError: the safetensors library is not installed.
        OSError: the disk is full, for instance; nothing is left then.
    """
    tensors, tied, left_out = _tensors(parts)
    entries = {name: (stored.shape, stored.dtype) for name, stored in tensors.items()}
    with safetensors_output(target, secrets.token_hex(8), entries, tied, max_shard_size) as output:
        for name, stored in tensors.items():
            output.write(name, stored.read())
            progress(stored.nbytes)
        output.commit()
    return left_out


def _tensors(parts: Parts) -> tuple[dict[str, Stored], dict[str, str], list[str]]:
    """Return what is stored under which name, the further names of tied tensors, and what is no tensor."""
    found: dict[str, Stored] = {}
    names: dict[Any, str] = {}
    tied: dict[str, str] = {}
    places: dict[str, str] = {}
    left_out = []
    models = {"": parts.model, **{f"{name}.": own for name, own in parts.models.items()}}
    for prefix, model in models.items():
        for key, value in model.items():
            name = f"{prefix}{key}"
            where = f"{key!r} of the model" + (f" {prefix[:-1]!r}" if prefix else "")
            if places.setdefault(name, where) != where:
                raise ConfigError(
                    f"{places[name]} and {where} would both be {name!r}, since safetensors has one name for each tensor. "
                    "Rename one of them, or write a torch file."
                )
            if not isinstance(value, Stored):
                left_out.append(name)
                continue
            if names.setdefault(value.place, name) == name:
                found[name] = value
            else:
                tied[name] = names[value.place]
    return found, tied, left_out
