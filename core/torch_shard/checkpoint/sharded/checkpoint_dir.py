"""An existing checkpoint, opened: its metadata, and reading entries of it into memory, verified where it has a manifest."""

from __future__ import annotations

import io
import os
import pickle
import zlib
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list

from ...errors import CheckpointError
from ...shard_tensor.tensor import ShardTensor
from ..format.atomic_directory import find
from ..format.dcp_metadata import METADATA, load_metadata
from ..format.manifest import MANIFEST, SAVE_ID, Manifest, read_manifest
from ..format.torch_file import not_trusted
from .reader import ShardReader, check_sizes

__all__ = ["Checkpoint"]


class Checkpoint:
    """A directory that DCP or this package wrote.

    Attributes:
        folder: where it is.
        manifest: None for one that this package didn't write.
        metadata: DCP's.
        fingerprint: of the metadata; equal on two ranks that see the same checkpoint.
    """

    def __init__(
        self, folder: Path, manifest: Manifest | None, found: ShardReader | Metadata, fingerprint: int
    ) -> None:
        self.folder, self.manifest, self.fingerprint = folder, manifest, fingerprint
        self._reader = found if isinstance(found, ShardReader) else None
        self.metadata = found.metadata if isinstance(found, ShardReader) else found

    @classmethod
    def open(cls, path: str | os.PathLike[str], sizes: bool) -> Checkpoint:
        """Read what a checkpoint says of itself. Not collective.

        Args:
            path: of the directory.
            sizes: look at all its files' sizes.

        Raises:
            CheckpointError: there is none, it is damaged, or a newer version's.
        """
        folder = find(Path(os.path.abspath(os.fsdecode(path))))
        if not folder.is_dir():
            raise CheckpointError(
                f"{folder} is a file, and engine.load reads directories that engine.save or DCP wrote."
            )
        manifest = read_manifest(folder)
        if manifest is not None:
            if sizes:
                check_sizes(folder, manifest)
            reader = ShardReader(folder, manifest)
            if getattr(reader.metadata.storage_meta, "save_id", None) != manifest.id:
                raise CheckpointError(
                    f"{folder}: {MANIFEST} and {METADATA} are of different checkpoints; load another one."
                )
            return cls(folder, manifest, reader, manifest.files[METADATA].crc32)
        try:
            raw = (folder / METADATA).read_bytes()
        except FileNotFoundError as error:
            raise CheckpointError(f"{folder} holds no checkpoint: it has neither {MANIFEST} nor {METADATA}.") from error
        metadata = load_metadata(io.BytesIO(raw), str(folder / METADATA))
        if str(getattr(metadata.storage_meta, "save_id", None)).startswith(SAVE_ID):
            raise CheckpointError(
                f"{folder / MANIFEST} is missing, so the checkpoint can't be verified; nothing was loaded. Load another one."
            )
        return cls(folder, None, metadata, zlib.crc32(raw))

    def tensor(self, name: str) -> TensorStorageMetadata | None:
        """Return an entry's shape, dtype and chunks; None for an object."""
        found = self.metadata.state_dict_metadata[name]
        return found if isinstance(found, TensorStorageMetadata) else None

    def read(
        self,
        tensors: Mapping[str, torch.Tensor],
        objects: Iterable[str],
        unpickle: Callable[[str, IO[bytes]], Any] | None = None,
    ) -> dict[str, Any]:
        """Fill tensors and read objects. Not collective.

        Args:
            tensors: by name; a plain one of the entry's shape takes all of it, a ShardTensor its shard. Converted to their
                dtypes.
            objects: names of others.
            unpickle: makes an object of its name and bytes; by default torch's loader that runs no code.

        Returns:
            The objects by name.

        Raises:
            CheckpointError: something is damaged or missing, or an object's class is not allowed.
        """
        planner = _Into(tensors, self.folder, unpickle)
        items = [_object_item(name) for name in objects] + self._items(tensors)
        with torch.no_grad():
            if self._reader is not None:
                self._reader.read(items, planner)
            else:
                self._read_with_torch(items, planner)
        return planner.objects

    def verify(self, tensors: Mapping[str, torch.Tensor]) -> bool:
        """Look at all bytes that :meth:`read` would fill these tensors with; it will then do no more than that. Not collective.

        Returns:
            False where there are no checksums, so that only reading can tell.

        Raises:
            CheckpointError: something is damaged or missing.
        """
        if self._reader is None:
            return False
        self._reader.verify(self._items(tensors))
        return True

    def close(self) -> None:
        """Let go of the files."""
        if self._reader is not None:
            self._reader.close()

    def _items(self, tensors: Mapping[str, torch.Tensor]) -> list[ReadItem]:
        items: list[ReadItem] = []
        for name, value in tensors.items():
            found = self.tensor(name)
            if found is None:
                raise CheckpointError(f"{self.folder}: {name} is no tensor.")
            items += create_read_items_for_chunk_list(name, found, _chunks(value))
        return items

    def _read_with_torch(self, items: list[ReadItem], planner: Any) -> None:
        """Entry by entry, for an error that names it. torch's reader finds what is cut off or no archive; it is built without
        the comparison of checksums."""
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


def _object_item(name: str) -> ReadItem:
    index, none = MetadataIndex(name), torch.Size((0,))
    return ReadItem(LoadItemType.BYTE_IO, index, none, index, none, none)


def _chunks(tensor: torch.Tensor) -> list[ChunkStorageMetadata]:
    if isinstance(tensor, ShardTensor):
        found: list[ChunkStorageMetadata] = tensor.__create_chunk_list__()
        return found
    return [ChunkStorageMetadata(torch.Size([0] * tensor.dim()), tensor.size())]


class _Into:
    """Puts what is read where it belongs."""

    def __init__(
        self,
        tensors: Mapping[str, torch.Tensor],
        folder: Path,
        unpickle: Callable[[str, IO[bytes]], Any] | None = None,
    ) -> None:
        self.tensors, self.folder, self.objects = tensors, folder, dict[str, Any]()
        self._unpickle = unpickle

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        name = read_item.dest_index.fqn
        if self._unpickle is not None:
            self.objects[name] = self._unpickle(name, value)
            return
        try:
            self.objects[name] = torch.load(value, map_location="cpu", weights_only=True)
        except pickle.UnpicklingError as error:
            raise not_trusted(f"{self.folder}: {name}", error) from error

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        index = read_item.dest_index
        tensor = self.tensors[index.fqn]
        if isinstance(tensor, ShardTensor):
            tensor = tensor.__get_tensor_shard__(index)
        for dim, (offset, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=True)):
            if dim < tensor.dim() and tensor.shape[dim] != length:
                tensor = tensor.narrow(dim, offset, length)
        return tensor

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Nothing to do: what was resolved is the place itself."""
