"""Opening full checkpoints: a torch file, a safetensors file, or a directory of safetensors files.

Tensors are mapped from the files, privately. So only pages that are used are read, and they belong to the system's cache and not
to the process.
"""

from __future__ import annotations

import json
import os
import pickle
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ...errors import CheckpointError
from ..format.atomic_directory import find
from ..format.dcp_metadata import METADATA
from ..format.fileio import damaged, some, unsupported
from ..format.manifest import MANIFEST
from ..format.safetensors import INDEX, SINGLE, library
from ..format.torch_file import not_trusted, verify_torch_file

_FRAMEWORKS = ("pt", "tf", "flax", "np", "mlx")  # that wrote a safetensors file, by its metadata
_ENDS = 64 << 10  # bytes at each end of a file whose checksum tells it from other files


@dataclass(frozen=True)
class FullFile:
    """An opened full checkpoint.

    Attributes:
        path: the file, which is an index if there are several.
        kind: ``"torch"`` or ``"safetensors"``.
        values: the file's contents: for safetensors a dict of tensors by name, for a torch file whatever was saved. Tensors are
            mapped; changing one does not change the file.
        files: all files of the checkpoint, the index included.
        tied: the names that a safetensors file does not store, with the names of the tensors that they stand for.
    """

    path: Path
    kind: str
    values: Any
    files: tuple[Path, ...]
    tied: Mapping[str, str] = field(default_factory=dict)
    _where: Mapping[str, Path] = field(default_factory=dict)

    def file_of(self, name: str) -> Path:
        """Return the file that holds an entry of this name."""
        return self._where.get(name, self.files[0])

    def checksums(self) -> dict[Path, tuple[str, int, int]]:
        """Return name, size and checksum of both ends of each file."""
        return {path: (path.name, *_ends(path)) for path in self.files}

    def fingerprint(self) -> tuple[tuple[str, int, int], ...]:
        """Return a key that is equal on two ranks that see the same files: names, sizes and checksums of both ends."""
        return tuple(self.checksums().values())


def is_full(path: str | os.PathLike[str]) -> bool:
    """Return True if a path leads to any file or to a directory of safetensors files, and False for a sharded checkpoint."""
    try:
        found = find(path)
        return found.is_file() or format_of(found) == "safetensors"
    except (OSError, CheckpointError):  # opening it will raise the same error
        return False


def open_full(path: str | os.PathLike[str]) -> FullFile:
    """Open a full checkpoint. Not collective, and needs no process group.

    Args:
        path: the path of a file that ``torch.save`` or ``engine.save_full`` wrote, of a safetensors file, or of a directory with
            ``model.safetensors`` or ``model.safetensors.index.json``.

    Raises:
        CheckpointError: there is no checkpoint, one of its files is missing or damaged, it is in torch's format from before 1.6,
            or it holds objects whose unpickling could run code.
        UnavailableError: the files are safetensors, and the library is not installed.
    """
    found = find(path)
    if found.is_dir():
        name = next((name for name in (SINGLE, INDEX) if (found / name).is_file()), None)
        if name is None:
            raise CheckpointError(
                f"{found} holds no checkpoint: it has neither {MANIFEST} nor {METADATA} nor {SINGLE} nor {INDEX}."
            )
        found /= name
    if not found.is_file():
        raise CheckpointError(f"there is no checkpoint at {found}.")
    if found.name.endswith(INDEX):
        return _open_index(found)
    if format_of(found) == "safetensors":
        values, tied = _mapped(found)
        return FullFile(found, "safetensors", values, (found,), tied)
    return _open_torch(found)


def format_of(path: Path) -> str | None:
    """Return the kind of the checkpoint at a path, by names and first bytes: ``"sharded"``, ``"torch"`` or ``"safetensors"``.

    None for a file or directory that is no checkpoint.

    Raises:
        OSError: nothing is there, or it can't be read.
    """
    if path.is_dir():
        if any((path / name).exists() for name in (MANIFEST, METADATA)):
            return "sharded"
        return "safetensors" if any((path / name).exists() for name in (SINGLE, INDEX)) else None
    if path.name.endswith(INDEX) or path.suffix == ".safetensors":
        return "safetensors"
    with open(path, "rb") as file:
        first = file.read(9)
    if first[:2] == b"PK":
        return "torch"
    # Eight bytes hold the length of the header, which is JSON. A file in a download cache may have any name.
    return "safetensors" if first[8:] == b"{" else None


def _ends(path: Path) -> tuple[int, int]:
    """Return the size of a file, and the CRC-32 of its two ends."""
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        crc = zlib.crc32(file.read(_ENDS))
        file.seek(max(0, size - _ENDS))
        return size, zlib.crc32(file.read(_ENDS), crc)


def refuse_damaged(path: Path, rank: int = 0, ranks: int = 1, ending: str = "") -> None:
    """Verify this rank's share of a torch file by its checksums, see :func:`~..format.torch_file.verify_torch_file`.

    Only members whose names end with `ending` are verified. Files in other formats, that of torch before 1.6 among them, have no
    checksums.

    Raises:
        CheckpointError: that share is damaged.
    """
    if format_of(path) != "torch":
        return
    try:
        verify_torch_file(path, rank, ranks, ending=ending)
    except Exception as error:
        raise damaged(path, error) from error


# -- torch ------------------------------------------------------------------------------------------------------------


def _open_torch(path: Path) -> FullFile:
    if format_of(path) is None:
        with open(path, "rb") as file:
            first = file.read(4)
        legacy = first[:1] == b"\x80"  # a pickle
        raise CheckpointError(
            f"{path} is in torch's format of before 1.6, which can't be read in parts. Convert it once: "
            f"torch.save(torch.load({str(path)!r}, weights_only=True), 'converted.pt')"
            if legacy
            else f"{path} is a file, and neither a torch file nor safetensors: it begins with {first!r}."
        )
    return FullFile(path, "torch", _loaded(path), (path,))


def _refuse_compressed(path: Path) -> None:
    """Raise for a torch file with compressed members, whose values can't be mapped."""
    try:
        with zipfile.ZipFile(path) as archive:
            packed = [member.filename for member in archive.infolist() if member.compress_type != zipfile.ZIP_STORED]
    except Exception:  # damage leads zipfile to many errors; torch.load raises its own
        return
    if packed:
        raise unsupported(
            f"{path} is an archive with compressed members ({packed[0]}), as torch does not write it. Re-save it with "
            f"torch.save(torch.load({str(path)!r}, weights_only=True), 'plain.pt')."
        )


def _loaded(path: Path) -> Any:
    _refuse_compressed(path)
    refuse_damaged(path, ending="data.pkl")  # which could seem to hold a class that is not allowed, or other names
    try:
        return torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except pickle.UnpicklingError as error:
        raise not_trusted(str(path), error) from error
    except Exception as error:
        if "TorchScript" in str(error):
            raise CheckpointError(
                f"{path} is a TorchScript archive, a program; nothing was loaded. Save model.state_dict() with torch.save."
            ) from error
        raise damaged(path, error) from error


# -- safetensors ------------------------------------------------------------------------------------------------------


def _open_index(path: Path) -> FullFile:
    where = _weight_map(path)
    values: dict[str, torch.Tensor] = {}
    tied: dict[str, str] = {}
    names: dict[str, list[str]] = {}
    for name, file in where.items():
        names.setdefault(file, []).append(name)
    for file, expected in sorted(names.items()):
        found, also = _mapped(path.parent / file, expected)
        lost = [name for name in expected if name not in found]
        if lost:
            raise CheckpointError(f"{path.parent / file} does not hold {some(lost)}, which {path.name} says it does.")
        values.update((name, found[name]) for name in expected)
        tied.update(also)
    files = (path, *(path.parent / file for file in sorted(names)))
    return FullFile(path, "safetensors", values, files, tied, {n: path.parent / f for n, f in where.items()})


def _weight_map(path: Path) -> dict[str, str]:
    try:
        where = json.loads(path.read_text(encoding="utf-8"))["weight_map"]
        # A name with a directory in it could lead anywhere.
        good = isinstance(where, dict) and all(isinstance(f, str) and f == os.path.basename(f) for f in where.values())
        if not good:
            raise ValueError("weight_map must map names to files beside the index")
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(
            f"{path} is damaged or no index of safetensors files ({type(error).__name__}: {error})."
        ) from error
    return dict(where)


def _mapped(path: Path, expected: list[str] | None = None) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return the mapped tensors of a safetensors file by name, and the names that it doesn't store, with those that it does."""
    safetensors = library()
    with_what = "" if expected is None else f", with {some(expected)}"
    if not path.is_file():
        raise CheckpointError(f"{path} is missing{with_what}. Nothing was loaded.")
    try:
        with safetensors.safe_open(str(path), framework="pt", device="cpu") as file:
            metadata = file.metadata() or {}
            values = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - it is no dict
    except OSError:
        raise
    except Exception as error:
        raise damaged(path, error, with_what) from error
    if metadata.get("format") in _FRAMEWORKS:  # the format's own entry, also where a tensor is called "pt"
        del metadata["format"]
    return values, {name: kept for name, kept in metadata.items() if kept in values and name not in values}
