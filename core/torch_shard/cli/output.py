"""What the commands share: JSON, tables, sizes, and a progress bar."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from tqdm import tqdm

from ..checkpoint.format.fileio import Progress
from ..checkpoint.format.manifest import dtype_name

_NUMBERS = ("parameters", "elements", "bytes")  # heads of the columns that are set to the right


def print_json(value: dict[str, Any]) -> None:
    """Print one JSON object."""
    print(json.dumps(plain(value), indent=2))


def plain(value: Any) -> Any:
    """Return nested values with texts in place of what JSON does not have."""
    if isinstance(value, dict):
        return {str(key): plain(own) for key, own in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(own) for own in value]
    if isinstance(value, torch.dtype):
        return dtype_name(value)
    if isinstance(value, torch.Tensor):
        return plain(value.tolist()) if value.numel() <= 1 else f"tensor {list(value.shape)} {dtype_name(value.dtype)}"
    if isinstance(value, float) and not abs(value) < float("inf"):
        return str(value)  # JSON has no inf and no nan
    return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)


@contextlib.contextmanager
def progress(total: int, what: str) -> Iterator[Progress]:
    """Show a progress bar on standard error, if that is a terminal, and give a function that advances it by bytes."""
    # With disable=None it shows on a terminal only.
    with tqdm(total=total, desc=what, unit="B", unit_scale=True, leave=False, disable=None) as bar:
        yield bar.update


def size(nbytes: int) -> str:
    """Return a number of bytes as text, in powers of 1000: "1.5 GB"."""
    value, units = float(nbytes), ["B", "kB", "MB", "GB", "TB", "PB"]
    while value >= 999.5 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.3g} {units[0]}"


def short(value: Any, limit: int = 60) -> str:
    """Return a value as text on one line."""
    text = repr(plain(value)) if isinstance(value, torch.Tensor) else repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Return rows of text under the heads of their columns. Columns without any text are left out, numbers are to the right."""
    columns = [column for column in zip(heads, *rows, strict=True) if not rows or any(column[1:])]
    padded = []
    for head, *cells in columns:
        wide = max(map(len, (head, *cells)))
        padded.append([c.rjust(wide) if head in _NUMBERS else c.ljust(wide) for c in (head, *cells)])
    return "\n".join("  ".join(line).rstrip() for line in zip(*padded, strict=True))
