"""Opening a checkpoint of any format as a tree of entries, which are read one at a time, by one process alone.

The tree is what ``torch.load`` would return, except for its leaves: a tensor is a :class:`Stored`, which reads it, and an object
of a sharded checkpoint is a :class:`StoredObject`. :mod:`.classify` finds models and optimizers in it.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ...errors import CheckpointError
from ...utils.tensor_memory import memory_key
from ..format.atomic_directory import find
from ..format.dcp_metadata import METADATA
from ..format.manifest import Manifest, versions_of
from ..full.open_files import FullFile, format_of, open_full
from ..sharded.checkpoint_dir import Checkpoint
from ..sharded.entries import MODEL
from ..sharded.entry_tree import Stored, StoredObject, model_key, tree_of

LIGHTNING_META = "meta.pt"
"""The file that Lightning writes beside DCP's, with everything but model and optimizers."""

SHARDED, DCP = "torch-shard", "dcp"


@dataclass(frozen=True, eq=False)
class Opened:
    """An opened checkpoint.

    Attributes:
        path: the directory or file.
        format: "torch-shard" (this package's), "dcp" (another one of torch.distributed.checkpoint), "torch" (one file) or
            "safetensors".
        tree: the entries, nested.
        files: the sizes of the files in bytes, by name.
        manifest: the manifest of this package's checkpoints, else None.
        module_versions: the versions of the model's modules, as far as they are known.
        saved_at: the time of the save in seconds since 1970; without a manifest that of the file.
    """

    path: Path
    format: str
    tree: dict[Any, Any]
    files: dict[str, int]
    manifest: Manifest | None
    module_versions: dict[str, Any]
    saved_at: float


def open_checkpoint(path: str | os.PathLike[str]) -> Opened:
    """Open a checkpoint of any format that this package knows.

    Args:
        path: a directory that this package, torch.distributed.checkpoint or Lightning wrote, or that holds model.safetensors or
            its index; or a file of torch.save or safetensors.

    Raises:
        CheckpointError: there is no checkpoint, it is damaged, or it needs a newer version of this package.
        OSError: the checkpoint can't be read.
    """
    target = find(path)
    return _sharded(Checkpoint.open(target)) if format_of(target) == "sharded" else _full(target)


# -- directories of torch.distributed.checkpoint ----------------------------------------------------------------------


def _sharded(checkpoint: Checkpoint) -> Opened:
    tree = tree_of(checkpoint)
    folder, manifest = checkpoint.folder, checkpoint.manifest
    rest = folder / LIGHTNING_META  # Lightning's own file
    if manifest is None and rest.is_file():
        tree[rest.name] = StoredObject(rest.name, (rest.name,), lambda: _stored_values(open_full(rest)))
    return Opened(
        folder,
        SHARDED if manifest is not None else DCP,
        tree,
        {file.name: file.stat().st_size for file in sorted(folder.iterdir()) if file.is_file()},
        manifest,
        manifest.module_versions.get(MODEL, {}) if manifest is not None else {},
        manifest.saved_at if manifest is not None else (folder / METADATA).stat().st_mtime,
    )


# -- files of one process ---------------------------------------------------------------------------------------------


def _full(path: Path) -> Opened:
    found = open_full(path)
    tree = _stored_values(found)
    if not isinstance(tree, dict):
        raise CheckpointError(f"{path} holds {type(found.values).__name__} and no dict, so it is no checkpoint.")
    key = model_key(tree)
    for name, kept in found.tied.items():
        tree[name] = dataclasses.replace(tree[kept], name=name)
    return Opened(
        path,
        found.kind,
        tree,
        {file.name: file.stat().st_size for file in found.files},
        None,
        versions_of(found.values if key is None else found.values[key]),
        path.stat().st_mtime,
    )


def _stored_values(file: FullFile) -> Any:
    """Return a copy of a file's nested values with a :class:`Stored` in place of each tensor."""
    around: set[int] = set()

    def copied(tree: Any, path: tuple[Any, ...] = ()) -> Any:
        if isinstance(tree, torch.Tensor):
            return _stored(file, tree, ".".join(map(str, path)))
        if not isinstance(tree, (Mapping, list)) and type(tree) is not tuple:
            return tree
        if id(tree) in around:
            raise CheckpointError(
                f"{file.path}: {'.'.join(map(str, path))} contains itself, which no other format can hold. Save a checkpoint "
                "without it."
            )
        around.add(id(tree))
        items = tree.items() if isinstance(tree, Mapping) else enumerate(tree)
        made = {key: copied(value, (*path, key)) for key, value in items}
        around.remove(id(tree))
        return made if isinstance(tree, Mapping) else (list if isinstance(tree, list) else tuple)(made.values())

    return copied(file.values)


def _stored(file: FullFile, tensor: torch.Tensor, name: str) -> Stored:
    # Other kinds are refused: reading quantized tensors byte by byte ends the process, and meta tensors have no values.
    kind = "quantized" if tensor.is_quantized else str(tensor.layout).removeprefix("torch.")
    kind = "meta" if tensor.is_meta else kind
    if kind != "strided" or tensor.is_nested:
        raise CheckpointError(
            f"{file.path}: {name} is a {'nested' if kind == 'strided' else kind} tensor, and only plain dense ones can be "
            "read here. Save it as a dense tensor (tensor.to_dense(), tensor.dequantize()), or leave it out."
        )
    place = memory_key(tensor) if tensor.numel() else name
    files = (file.file_of(name).name,)
    return Stored(name, tensor.shape, tensor.dtype, place, files, lambda: tensor.detach().resolve_conj().resolve_neg())
