"""DCP's metadata, and what else this package needs of torch.distributed.checkpoint beyond its public interface.

Tested with torch 2.11 and 2.13.
"""

from __future__ import annotations

import collections
import pathlib
import pickle
from collections.abc import Mapping, Sequence
from typing import IO, Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    Metadata,
    StorageMeta,
)

from ...errors import CheckpointError

METADATA = ".metadata"
"""Name of the file in which DCP keeps its metadata."""

# Where an entry lies: file, offset, length. FileSystemReader finds objects of this class in the metadata.
StorageInfo = filesystem._StorageInfo

_CLASSES: dict[tuple[str, str], Any] = {
    **{
        (metadata.__name__, name): getattr(metadata, name)
        for name in (
            "BytesStorageMetadata",
            "ChunkStorageMetadata",
            "Metadata",
            "MetadataIndex",
            "StorageMeta",
            "TensorProperties",
            "TensorStorageMetadata",
            "_MEM_FORMAT_ENCODING",
        )
    },
    (filesystem.__name__, "_StorageInfo"): StorageInfo,
    ("torch", "Size"): torch.Size,
    ("torch.serialization", "_get_layout"): torch.serialization._get_layout,
    ("collections", "OrderedDict"): collections.OrderedDict,
    ("builtins", "set"): set,
    # A checkpoint_id may be a path; which class it had does not matter.
    **{
        (module, name): pathlib.PurePosixPath if "Posix" in name else pathlib.PureWindowsPath
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath")
    },
}


class _Unpickler(pickle.Unpickler):
    """An unpickler that finds DCP's own classes alone, since a pickle could call any function."""

    def __init__(self, file: IO[bytes], path: str) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        found = _CLASSES.get((module, name))
        if module == "torch" and isinstance(getattr(torch, name, None), torch.dtype):
            found = getattr(torch, name)
        if found is None:
            raise CheckpointError(
                f"{self._path} asks for {module}.{name}, which no checkpoint's metadata needs: it was refused, and nothing was "
                "loaded. Don't trust this file unless you know where it comes from; a planner or storage of your own that keeps "
                "such objects in it needs torch.distributed.checkpoint.load itself."
            )
        return found


def load_metadata(file: IO[bytes], path: str) -> Metadata:
    """Read DCP's metadata without running what it may contain. Not collective.

    Raises:
        CheckpointError: the metadata is damaged, or asks for a class that is not DCP's, which the error names.
    """
    before = {cls: dict(vars(cls)) for cls in set(_CLASSES.values()) if isinstance(cls, type)}
    try:
        found: Metadata = _Unpickler(file, path).load()
        _check(found)
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(
            f"{path} is damaged, so nothing was loaded: {type(error).__name__}: {error}. Load an earlier checkpoint, or copy the "
            "file again."
        ) from error
    finally:
        changed = [cls.__name__ for cls, attributes in before.items() if _restored(cls, attributes)]
        if changed:
            raise CheckpointError(
                f"{path} changes the class {changed[0]}, which no checkpoint's metadata does: refused."
            )
    if found.storage_meta is None:
        found.storage_meta = StorageMeta()
    return found


def _check(found: Metadata) -> None:
    """Raise if an attribute that reading needs is missing or wrong: unpickled objects may have any attributes."""
    if not isinstance(found, Metadata) or not isinstance(found.storage_meta, StorageMeta | None):
        raise TypeError(f"{type(found).__name__} in place of DCP's metadata")
    for name, entry in found.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            continue
        sizes = [entry.size, *(size for chunk in entry.chunks for size in (chunk.offsets, chunk.sizes))]
        wrong = any(len(size) != len(entry.size) or min(size, default=0) < 0 for size in sizes)
        if wrong or not isinstance(entry.properties.dtype, torch.dtype) or not isinstance(name, str):
            raise ValueError(f"the entry {name!r} is no tensor and no object")
    for index, info in found.storage_data.items():
        if (
            not isinstance(index.fqn, str)
            or not isinstance(info.relative_path, str)
            or min(info.offset, info.length) < 0
        ):
            raise ValueError(f"{index.fqn!r} has no place")
    # Another planner may keep anything else.
    if isinstance(found.planner_data, Mapping) and not all(
        isinstance(p, Sequence) for p in found.planner_data.values()
    ):
        raise TypeError("the path of an entry is no sequence")


def _restored(cls: type, attributes: dict[str, Any]) -> bool:
    """Undo what a pickle did to a class, which it can name in place of an object; return True if it did anything."""
    now = dict(vars(cls))
    different = [name for name in now.keys() | attributes.keys() if now.get(name, cls) is not attributes.get(name, cls)]
    for name in different:
        if name in attributes:
            setattr(cls, name, attributes[name])
        else:
            delattr(cls, name)
    return bool(different)
