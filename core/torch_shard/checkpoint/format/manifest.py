"""The manifest of a sharded checkpoint, ``manifest.json``, which is written last.

A directory with this file is a complete checkpoint. It holds the versions and the plan that the checkpoint was made with, a table
of the parameters, and for every file its size and checksums::

    {"crc32": "89abcdef", "manifest": {
      "format": "torch-shard checkpoint", "version": 1, "id": ..., "saved_at": seconds since 1970,
      "torch": ..., "torch_shard": ..., "world_size": ..., "strategy": ...,
      "whole": [entries of optimizer state that have their parameter's shape, but are not sharded],
      "units": [{"name": ..., "parameters": [names]}],
      "parameters": [{"name": ..., "shape": [...], "dtype": "float32", "trainable": true}],
      "module_versions": {...},
      "files": {"__0_0.distcp": {"size": ..., "crc32": ..., "marks": [[position, crc], ...],
                                 "sums": [digest or null, ...],
                                 "items": [[name, offsets or null, start, length, values], ...]}}}}

``marks`` are the file's running CRC-32 at some positions: where an item begins, and within a large one every few MiB of its
values. The bytes between two of these positions can be verified by themselves, since a CRC can be continued from the value
before. ``sums`` has a faster checksum (:mod:`.checksum`) for each such block that is large; the first releases wrote none.
"""

from __future__ import annotations

import functools
import json
import os
import time
import zlib
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch

from ...errors import CheckpointError
from ...versions import __version__
from .fileio import unsupported

MANIFEST = "manifest.json"
_FORMAT = "torch-shard checkpoint"
_VERSION = 1
SAVE_ID = "torch-shard-"
"""The beginning of the id that the manifest and DCP's metadata share."""


@dataclass(frozen=True)
class ItemRecord:
    """One entry of a file.

    Attributes:
        name: the name of the tensor or object, as DCP knows it.
        offsets: the part's place in the tensor; None for an object.
        start, length: its bytes in the file.
        values: the position of a tensor's first value.
    """

    name: str
    offsets: tuple[int, ...] | None
    start: int
    length: int
    values: int


@dataclass(frozen=True)
class FileRecord:
    """The record of one file.

    Attributes:
        size, crc32: the size and checksum of the file.
        checksums: positions, with the running CRC-32 up to each. The last position is the end.
        items: the entries in the file.
        sums: the faster checksum of each block between two positions, None for a small block; empty if there are none.
    """

    size: int
    crc32: int
    checksums: tuple[tuple[int, int], ...] = ()
    items: tuple[ItemRecord, ...] = ()
    sums: tuple[str | None, ...] = ()

    @functools.cached_property
    def places(self) -> dict[tuple[str, tuple[int, ...] | None], ItemRecord]:
        """The items by name and offsets."""
        return {(item.name, item.offsets): item for item in self.items}

    def names_in(self, first: int, last: int) -> tuple[str, ...]:
        """Return the names of the entries that have some of the bytes ``[first, last)``."""
        return tuple(dict.fromkeys(i.name for i in self.items if i.start < last and i.start + i.length > first))


@dataclass(frozen=True)
class Manifest:
    """The contents of a manifest; see the module's docstring. ``files`` has every file of the checkpoint but the manifest."""

    id: str
    world_size: int
    strategy: str
    units: tuple[dict[str, Any], ...]
    parameters: tuple[dict[str, Any], ...]
    module_versions: dict[str, dict[str, Any]]
    files: dict[str, FileRecord]
    whole: tuple[str, ...] = ()
    torch: str = torch.__version__
    torch_shard: str = __version__
    saved_at: float = field(default_factory=time.time)
    format: str = _FORMAT
    version: int = _VERSION

    def to_text(self) -> str:
        """Return the text of the file."""
        # Not dataclasses.asdict, which copies everything once more.
        files = {
            name: {
                "size": record.size,
                "crc32": record.crc32,
                "marks": record.checksums,
                "sums": record.sums,
                "items": [(i.name, i.offsets, i.start, i.length, i.values) for i in record.items],
            }
            for name, record in self.files.items()
        }
        body = json.dumps({**vars(self), "files": files}, separators=(",", ":"))
        return f'{{"crc32":"{zlib.crc32(body.encode()):08x}","manifest":{body}}}\n'


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a dtype as a manifest has it, without "torch."."""
    return str(dtype).removeprefix("torch.")


def parameter_row(name: str, shape: torch.Size, dtype: torch.dtype, trainable: bool | None) -> dict[str, Any]:
    """Return the row of the table of parameters for one of them; `trainable` is None if that is not known."""
    return {"name": name, "shape": list(shape), "dtype": dtype_name(dtype), "trainable": trainable}


def versions_of(state_dict: Any) -> dict[str, Any]:
    """Return the versions of the modules' own formats, which ``Module.load_state_dict`` asks for; {} if it has none."""
    metadata = getattr(state_dict, "_metadata", None) or {}
    return {name: {"version": own["version"]} for name, own in metadata.items() if isinstance(own.get("version"), int)}


def read_manifest(folder: str | os.PathLike[str]) -> Manifest | None:
    """Read and check the manifest of a checkpoint. Not collective.

    Returns:
        None where there is none: the checkpoint was not written by this package.

    Raises:
        CheckpointError: it is damaged, or a newer version's.
        OSError: it can't be read.
    """
    path = Path(folder, MANIFEST)
    try:
        raw = path.read_bytes()
    except (FileNotFoundError, NotADirectoryError):
        return None
    try:
        outer = json.loads(raw)
        inner = outer["manifest"]
        if inner["format"] != _FORMAT:
            raise ValueError(f"its format is {inner['format']!r}")
        version, by = int(inner["version"]), inner.get("torch_shard", "?")
        if version <= _VERSION:
            return _manifest_of(raw, outer["crc32"], inner)
    except Exception as error:
        raise CheckpointError(
            f"{path} is damaged or no manifest of this package's ({type(error).__name__}: {error}). Load an earlier checkpoint."
        ) from error
    raise unsupported(
        f"{path} has format version {version}, written by torch-shard-engine {by}; this is {__version__}, which reads up to "
        f"version {_VERSION}. Upgrade torch-shard-engine."
    )


def _manifest_of(raw: bytes, crc: str, inner: dict[str, Any]) -> Manifest:
    # The text itself, since a dump of what was read need not give the same one.
    body = raw[raw.index(b'"manifest":') + len(b'"manifest":') : raw.rindex(b"}")]
    if f"{zlib.crc32(body):08x}" != crc:
        raise ValueError("its checksum differs")
    files = {
        name: FileRecord(
            record["size"],
            record["crc32"],
            tuple((position, crc) for position, crc in record["marks"]),
            tuple(ItemRecord(n, o if o is None else tuple(o), *places) for n, o, *places in record["items"]),
            tuple(record.get("sums", ())),
        )
        for name, record in inner["files"].items()
    }
    lists = {name: tuple(inner.get(name, ())) for name in ("units", "parameters", "whole")}
    # A later release may say more within one version.
    known = {each.name: inner[each.name] for each in fields(Manifest) if each.name in inner}
    return Manifest(**{**known, **lists, "files": files})
