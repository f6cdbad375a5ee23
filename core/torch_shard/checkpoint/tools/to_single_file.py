"""Writing a checkpoint as one file of torch.save or as safetensors, with one tensor in memory at a time."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import Any

from ...errors import ConfigError
from ..format.fileio import Progress
from ..full.output import safetensors_output, torch_output
from ..sharded.entry_tree import Stored
from .classify import Parts
from .open_any import Opened
from .torch_layout import Slots, torch_structure


def write_torch(opened: Opened, parts: Parts, target: Path, progress: Progress) -> None:
    """Write a file that ``torch.load(weights_only=True)`` reads; :mod:`.torch_layout` describes its structure.

    Args:
        opened, parts: the checkpoint and its contents.
        target: the path of the file, which appears when it is complete.
        progress: told the bytes of each tensor that has been written.

    Raises:
        CheckpointError: an entry is damaged, or the target is a directory.
        OSError: the disk is full, for instance. Then nothing is left at the target.
    """
    slots = Slots()
    structure = torch_structure(parts, slots, opened.module_versions)
    with torch_output(target, secrets.token_hex(8), structure) as output:
        for slot, stored in slots.of.values():
            output.write(slot, stored.read())
            progress(stored.nbytes)
        output.commit()


def write_safetensors(parts: Parts, target: Path, max_shard_size: int, progress: Progress) -> list[str]:
    """Write the tensors of a checkpoint's models, which are all that the format can hold.

    Args:
        parts: the checkpoint's contents.
        target: one file if it ends in ``.safetensors``, else a directory for ``model.safetensors``, or for several files and
            their index.
        max_shard_size: the limit in bytes for a file in a directory. One file is in memory at a time.
        progress: told the bytes of each tensor that has been written.

    Returns:
        The names of the models' entries that are no tensors and are left out.

    Raises:
        CheckpointError: an entry is damaged, or the format does not have its dtype.
        ConfigError: two tensors would have the same name.
        UnavailableError: the safetensors library is not installed.
        OSError: the disk is full, for instance. Then nothing is left at the target.
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
    """Return the tensors by name, the further names of tied tensors, and the names of entries that are no tensors."""
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
