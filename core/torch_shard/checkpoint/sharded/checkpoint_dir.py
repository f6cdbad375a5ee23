"""An existing sharded checkpoint, whose entries are verified when they are read if it has a manifest."""

from __future__ import annotations

import io
import os
import pickle
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, create_default_local_load_plan
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan, ReadItem

from ...errors import CheckpointError
from ..format.atomic_directory import find
from ..format.chunks import covers
from ..format.dcp_metadata import METADATA, load_metadata
from ..format.manifest import MANIFEST, SAVE_ID, Manifest, read_manifest
from ..format.torch_file import not_trusted
from .reader import CheckedFile, read_items

Unpickle = Callable[[str, IO[bytes]], Any]
"""A function that returns an object from the name and the bytes of its entry."""


@dataclass(frozen=True)
class Checkpoint:
    """A directory that DCP or this package wrote.

    Attributes:
        folder: the path of the directory.
        manifest: None if this package didn't write the directory.
        metadata: DCP's metadata.
        fingerprint: the CRC-32 of the metadata; equal on two ranks that see the same checkpoint.
    """

    folder: Path
    manifest: Manifest | None
    metadata: Metadata
    fingerprint: int

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Checkpoint:
        """Read what the checkpoint in a directory says of itself. Not collective.

        Raises:
            CheckpointError: there is none, it is damaged, or a newer version wrote it.
        """
        folder = find(os.fsdecode(path))
        manifest = read_manifest(folder)
        if manifest is not None:
            record = manifest.files[METADATA]
            raw = bytearray(record.size)
            CheckedFile(folder, METADATA, record).read(0, record.size, memoryview(raw))
        else:
            try:
                raw = bytearray((folder / METADATA).read_bytes())
            except (FileNotFoundError, NotADirectoryError) as error:
                raise CheckpointError(
                    f"{folder} holds no checkpoint: it has neither {MANIFEST} nor {METADATA}."
                ) from error
        metadata = load_metadata(io.BytesIO(raw), str(folder / METADATA))
        save_id = getattr(metadata.storage_meta, "save_id", None)
        if manifest is not None and save_id != manifest.id:
            raise CheckpointError(
                f"{folder}: {MANIFEST} and {METADATA} are of different checkpoints; load another one."
            )
        if manifest is None and str(save_id).startswith(SAVE_ID):
            raise CheckpointError(
                f"{folder / MANIFEST} is missing, so the checkpoint can't be verified; nothing was loaded. Load another one."
            )
        return cls(folder, manifest, metadata, zlib.crc32(raw))

    def tensor(self, name: str) -> TensorStorageMetadata | None:
        """Return an entry's shape, dtype and chunks; None for an object."""
        found = self.metadata.state_dict_metadata[name]
        return found if isinstance(found, TensorStorageMetadata) else None

    def read(
        self, tensors: Mapping[str, torch.Tensor], objects: Iterable[str], unpickle: Unpickle | None = None
    ) -> dict[str, Any]:
        """Fill tensors and return objects. Not collective.

        Args:
            tensors: the tensors to fill, by name. A plain tensor of the entry's shape takes all of it, a ShardTensor its shard.
                Values are converted to the tensors' dtypes.
            objects: names of other entries.
            unpickle: the unpickler of objects; by default torch's loader, which runs no code.

        Returns:
            The objects by name.

        Raises:
            CheckpointError: an entry is damaged or missing, or the class of an object is not allowed.
        """
        objects = list(objects)
        planner = _Planner(tensors, objects, unpickle or self._unpickle)
        items = self._items(planner.state_dict)
        with torch.no_grad():
            if self.manifest is not None:
                read_items(self.folder, self.manifest, self.metadata, items, planner)
            else:
                self._read_with_torch(items, planner)
        return {name: planner.state_dict[name] for name in objects}

    def verify(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """Verify all bytes that :meth:`read` would fill these tensors with, by the manifest, which must exist. Not collective.

        Raises:
            CheckpointError: an entry is damaged or missing.
        """
        assert self.manifest is not None
        read_items(self.folder, self.manifest, self.metadata, self._items(tensors), None)

    def _unpickle(self, name: str, file: IO[bytes]) -> Any:
        try:
            return torch.load(file, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise not_trusted(f"{self.folder}: {name}", error) from error

    def _items(self, entries: Mapping[str, Any]) -> Sequence[ReadItem]:
        for name in entries:
            found = self.tensor(name)
            if found is not None and not covers(found.size, found.chunks):  # the rest would be whatever memory held
                raise CheckpointError(
                    f"{self.folder}: {name} is not complete: its parts do not make up its shape {list(found.size)}. Use another "
                    "checkpoint."
                )
        items: Sequence[ReadItem] = create_default_local_load_plan(dict(entries), self.metadata).items
        return items

    def _read_with_torch(self, items: Sequence[ReadItem], planner: _Planner) -> None:
        """Read with torch's reader, which finds what is cut off or no archive; entry by entry, so that an error names it."""
        reader = FileSystemReader(self.folder)
        reader.set_up_storage_reader(self.metadata, False)
        groups: dict[MetadataIndex, list[ReadItem]] = {}
        for item in items:
            groups.setdefault(item.storage_index, []).append(item)
        for index, group in groups.items():
            try:
                reader.read_data(LoadPlan(group), planner).wait()
            except CheckpointError:
                raise
            except Exception as error:
                info = self.metadata.storage_data.get(index)
                where = self.folder / info.relative_path if info is not None else self.folder
                raise CheckpointError(
                    f"{where} is damaged or missing: {index.fqn} can't be read ({type(error).__name__}: {error}). Nothing was "
                    "loaded. Load an earlier checkpoint."
                ) from error


class _Planner(DefaultLoadPlanner):
    """torch's load planner, with another unpickler: torch's own would run code."""

    def __init__(self, tensors: Mapping[str, torch.Tensor], objects: Iterable[str], unpickle: Unpickle) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)
        self.state_dict, self._unpickle = {**dict.fromkeys(objects), **tensors}, unpickle

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        self.state_dict[name] = self._unpickle(name, value)
