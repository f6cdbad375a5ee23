"""What this package needs of torch.distributed.checkpoint beyond its public interface, in one place.

Tested with torch 2.11 and 2.13.
"""

from __future__ import annotations

import collections
import pathlib
import pickle
from collections.abc import Mapping
from typing import IO, Any

import torch
from torch.distributed.checkpoint import filesystem, metadata
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from ...errors import CheckpointError

__all__ = ["METADATA", "StorageInfo", "load_metadata"]

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
    """The metadata is a pickle, which could call any function: only DCP's own classes are let through."""

    def __init__(self, file: IO[bytes], path: str) -> None:
        super().__init__(file)
        self._path = path

    def find_class(self, module: str, name: str) -> Any:
        found = _CLASSES.get((module, name))
        if found is None and module == "torch":
            found = getattr(torch, name, None)
            if not isinstance(found, torch.dtype):
                found = None
        if found is None:
            raise CheckpointError(
                f"{self._path} asks for {module}.{name}, which no checkpoint's metadata needs: it was refused, and nothing was "
                "loaded. Don't trust this file unless you know where it comes from; a planner or storage of your own that keeps "
                "such objects in it needs torch.distributed.checkpoint.load itself."
            )
        return found

    def persistent_load(self, pid: Any) -> Any:
        raise CheckpointError(
            f"{self._path} refers to data outside itself, which no checkpoint's metadata does: refused."
        )


def load_metadata(file: IO[bytes], path: str) -> Metadata:
    """Read DCP's metadata without running what it may contain. Not collective.

    Raises:
        CheckpointError: it is damaged, or asks for a class that is not DCP's; names it.
    """
    before = {cls: dict(vars(cls)) for cls in set(_CLASSES.values()) if isinstance(cls, type)}
    try:
        found = _Unpickler(file, path).load()
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f"{path} is damaged, so nothing was loaded: {type(error).__name__}: {error}") from error
    finally:
        changed = [cls.__name__ for cls, attributes in before.items() if _restored(cls, attributes)]
    if changed:
        raise CheckpointError(f"{path} changes the class {changed[0]}, which no checkpoint's metadata does: refused.")
    if not isinstance(found, Metadata):
        raise CheckpointError(f"{path} holds {type(found).__name__} in place of DCP's metadata; nothing was loaded.")
    wrong = _wrong(found)
    if wrong:
        raise CheckpointError(
            f"{path} is damaged, so nothing was loaded: {wrong}. Load an earlier checkpoint, or copy the file again."
        )
    if found.storage_meta is None:
        found.storage_meta = StorageMeta()
    return found


def _wrong(found: Metadata) -> str:
    """What of the metadata is not as DCP writes it; empty where all is well. Unpickled objects may have any attributes."""
    entries, storage = getattr(found, "state_dict_metadata", None), getattr(found, "storage_data", None)
    if not isinstance(entries, dict) or not all(isinstance(name, str) for name in entries):
        return "it has no table of entries"
    for name, entry in entries.items():
        if not _is_entry(entry):
            return f"the entry {name!r} is no tensor and no object"
    if not isinstance(storage, dict) or not all(map(_is_index, storage)) or not all(map(_is_place, storage.values())):
        return "the table of places is not one"
    meta, paths = getattr(found, "storage_meta", None), getattr(found, "planner_data", None)
    if meta is not None and not isinstance(meta, StorageMeta):
        return "storage_meta is of another class"
    # Another planner may keep anything else.
    if isinstance(paths, Mapping) and not all(isinstance(path, (tuple, list)) for path in paths.values()):
        return "a path of an entry is not one"
    return ""


def _is_entry(entry: Any) -> bool:
    if isinstance(entry, BytesStorageMetadata):
        return True
    if not isinstance(entry, TensorStorageMetadata):
        return False
    properties, chunks = getattr(entry, "properties", None), getattr(entry, "chunks", None)
    if not isinstance(properties, TensorProperties) or not isinstance(getattr(properties, "dtype", None), torch.dtype):
        return False
    dims = _dims(getattr(entry, "size", None))
    return dims >= 0 and isinstance(chunks, list) and all(_is_chunk(chunk, dims) for chunk in chunks)


def _is_chunk(chunk: Any, dims: int) -> bool:
    if not isinstance(chunk, ChunkStorageMetadata):
        return False
    return all(_dims(getattr(chunk, name, None)) == dims for name in ("offsets", "sizes"))


def _dims(size: Any) -> int:
    """How many dimensions a size has; -1 where it is none."""
    return len(size) if isinstance(size, torch.Size) and all(n >= 0 for n in size) else -1


def _is_index(index: Any) -> bool:
    if not isinstance(index, MetadataIndex) or not isinstance(getattr(index, "fqn", None), str):
        return False
    return index.offset is None or _dims(index.offset) >= 0


def _is_place(info: Any) -> bool:
    if not isinstance(info, StorageInfo) or not isinstance(getattr(info, "relative_path", None), str):
        return False
    numbers = (getattr(info, name, None) for name in ("offset", "length"))
    return all(isinstance(number, int) and number >= 0 for number in numbers)


def _restored(cls: type, attributes: dict[str, Any]) -> bool:
    """Undo what a pickle did to a class, which it can name in place of an object; whether there was anything."""
    now = dict(vars(cls))
    different = [name for name in now.keys() | attributes.keys() if now.get(name, cls) is not attributes.get(name, cls)]
    for name in different:
        if name in attributes:
            setattr(cls, name, attributes[name])
        else:
            delattr(cls, name)
    return bool(different)
