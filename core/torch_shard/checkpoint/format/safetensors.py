"""A model in safetensors files, named as Hugging Face's tools name them.

::

    model.safetensors                           where one file holds it
    model-00001-of-00003.safetensors  ...       else, and beside them
    model.safetensors.index.json                which file has which entry, and the size of all

The format has one name for each piece of memory: tied weights are stored once, and their other names are in the file's metadata,
``{"lm_head.weight": "wte.weight"}``, as ``safetensors.torch.save_model`` has it. The files are written by the safetensors
library, which is only imported here, when it is needed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

import torch

from ...errors import CheckpointError, ConfigError, UnavailableError
from .fileio import make_durable, write_durable
from .mmap_buffer import copied

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"

WEIGHTS = re.compile(r"model(-\d{5}-of-\d{5})?\.safetensors|model\.safetensors\.index\.json")
"""Names of files of one model, which the next save replaces."""

_METADATA = "__metadata__"  # the format's own entry

_UNITS = {"K": 1, "M": 2, "G": 3, "T": 4}  # powers of 1000 or 1024


def library() -> Any:
    """Return the module ``safetensors``, with its ``torch``.

    Raises:
        UnavailableError: it is not installed.
    """
    try:
        import safetensors
        import safetensors.torch
    except ImportError as error:
        raise UnavailableError(
            "safetensors files need the safetensors library: pip install torch-shard-engine[safetensors]"
        ) from error
    return safetensors


def not_held(name: str, why: str) -> CheckpointError:
    """Return the error for an entry that the format can't hold. `why` is a clause about the files, and what helps."""
    return CheckpointError(f'{name} can\'t be saved: safetensors files {why}, or save a torch file (format="torch").')


def size_of(given: int | str, what: str = "max_shard_size") -> int:
    """Return bytes, given a number or text such as ``"5GB"`` (10^9) or ``"512MiB"`` (2^20).

    Raises:
        ConfigError: it is neither, or not positive.
    """
    found = re.fullmatch(r"(\d+|\d*\.\d+|\d+\.)\s*(?:([KMGT])(I?)B|B)?", str(given).strip().upper())
    size = 0
    if found is not None and isinstance(given, (int, str)):
        number, unit, binary = found.groups()
        size = int(Decimal(number) * (1024 if binary else 1000) ** _UNITS.get(unit, 0))
    if size < 1:
        raise ConfigError(f"{what} must be a number of bytes or text such as '5GB' or '512MiB', not {given!r}.")
    return size


class SafetensorsWriter:
    """A writer of one model into a folder that exists, file by file.

    Args:
        folder: the folder for the files.
        entries: shape and dtype of each tensor that is stored, by name.
        tied: further names of these tensors, with the names under which they are stored.
        max_shard_size: bytes of values in one file; a tensor that is larger has a file for itself.
        single: write one file of this name, however large.

    Raises:
        CheckpointError: a dtype or a name that the format does not have.
        UnavailableError: the safetensors library is not installed.
    """

    def __init__(
        self,
        folder: Path,
        entries: Mapping[str, tuple[torch.Size, torch.dtype]],
        *,
        tied: Mapping[str, str] = {},
        max_shard_size: int = 5 * 10**9,
        single: str | None = None,
    ) -> None:
        self.folder, self.entries, self.tied = Path(folder), dict(entries), dict(tied)
        self._library = library()
        if _METADATA in (*self.entries, *self.tied):
            raise not_held(_METADATA, "have an entry of their own of this name. Rename it")
        self._refuse_dtypes()
        self.files = _divided(self.entries, max_shard_size, single)
        self._left = dict(self.files)
        self._held: dict[str, torch.Tensor] = {}

    def _refuse_dtypes(self) -> None:
        for dtype in {dtype for _, dtype in self.entries.values()}:
            try:
                self._library.torch.load(self._library.torch.save({"x": torch.empty(0, dtype=dtype, device="cpu")}))
            except Exception as error:
                name = next(name for name, (_, found) in self.entries.items() if found == dtype)
                raise not_held(name, f"can't hold {dtype}. Convert it") from error

    def write(self, name: str, tensor: torch.Tensor) -> None:
        """Copy a tensor, and write the file that it completes. Call it once for each entry, file after file.

        Raises:
            ConfigError: it is not this tensor's turn, or it has another shape or dtype.
            OSError: the disk is full, for instance.
        """
        file, names = next(iter(self._left.items()), ("", []))
        if name not in names or name in self._held or (tensor.shape, tensor.dtype) != self.entries[name]:
            raise ConfigError(f"{self.folder}: {name} comes out of turn, or has another shape or dtype than announced.")
        # Memory of its own: the library refuses views of one storage, and the caller's may be filled with something else.
        self._held[name] = copied(tensor)
        if len(self._held) == len(names):
            self._write_file(file)

    def _write_file(self, name: str) -> None:
        del self._left[name]
        tied = {other: kept for other, kept in self.tied.items() if kept in self._held}
        path = self.folder / name
        try:
            # A name "format" can't be told from the library's own entry.
            self._library.torch.save_file(self._held, str(path), metadata={**tied, "format": "pt"})
        except self._library.SafetensorError as error:
            raise OSError(f"{path}: {error}") from error  # a full disk, say, which the library has wrapped
        self._held = {}
        make_durable(path)

    def finish(self) -> None:
        """Write the index, if there are several files, or the only file of a model without entries.

        Raises:
            ConfigError: some entries were not written.
            OSError: the disk is full, for instance.
        """
        if not self.entries:
            self._write_file(next(iter(self._left)))
        if self._left:
            lacking = next(name for names in self._left.values() for name in names if name not in self._held)
            raise ConfigError(f"{self.folder}: {lacking} was not written.")
        if len(self.files) == 1:
            return
        total = sum(shape.numel() * dtype.itemsize for shape, dtype in self.entries.values())
        where = {name: file for file, names in self.files.items() for name in names}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(where.items()))}
        write_durable(self.folder / INDEX, (json.dumps(index, indent=2) + "\n").encode())


def _divided(
    entries: Mapping[str, tuple[torch.Size, torch.dtype]], limit: int, single: str | None
) -> dict[str, list[str]]:
    """Return the names of the entries in each file."""
    if single is not None:
        return {single: list(entries)}
    parts: list[list[str]] = [[]]
    filled = 0
    for name, (shape, dtype) in entries.items():
        nbytes = shape.numel() * dtype.itemsize
        if parts[-1] and filled + nbytes > limit:
            parts.append([])
            filled = 0
        parts[-1].append(name)
        filled += nbytes
    if len(parts) == 1:
        return {SINGLE: parts[0]}
    return {f"model-{i:05d}-of-{len(parts):05d}.safetensors": names for i, names in enumerate(parts, 1)}
