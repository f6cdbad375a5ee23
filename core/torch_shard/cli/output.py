"""What the commands share: JSON, tables that fit the terminal, sizes, and a progress bar."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from tqdm import tqdm

__all__ = ["dtype_name", "fitted", "note", "plain", "print_json", "progress", "short", "size", "table", "width"]


def print_json(value: dict[str, Any]) -> None:
    """Print one object, for programs."""
    print(json.dumps(plain(value), indent=2))


def plain(value: Any) -> Any:
    """Return nested values as JSON has them; what it does not have becomes text."""
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


def note(text: str) -> None:
    """Say something beside the result."""
    print(f"torch-shard: {text}", file=sys.stderr)


@contextlib.contextmanager
def progress(total: int, what: str) -> Iterator[Callable[[int], object]]:
    """Show a bar of bytes on standard error, where that is a terminal; give what is called with bytes that are done."""
    with tqdm(
        total=total,
        desc=what,
        unit="B",
        unit_scale=True,
        leave=False,
        file=sys.stderr,
        disable=not sys.stderr.isatty(),
    ) as bar:
        yield bar.update


def size(nbytes: int) -> str:
    """Return bytes for people, in powers of 1000: "1.5 GB"."""
    value, units = float(nbytes), ["B", "kB", "MB", "GB", "TB", "PB"]
    while value >= 999.5 and len(units) > 1:
        value, units = value / 1000, units[1:]
    return f"{value:.3g} {units[0]}"


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name as the manifest has it, without "torch."."""
    return str(dtype).removeprefix("torch.")


def short(value: Any, limit: int = 60) -> str:
    """Return a value on one line."""
    text = repr(plain(value)) if isinstance(value, torch.Tensor) else repr(value)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def width() -> int | None:
    """Return the columns of the terminal; None where the output goes elsewhere, so that nothing need be cut."""
    if not sys.stdout.isatty() and "COLUMNS" not in os.environ:
        return None
    return shutil.get_terminal_size().columns


def fitted(text: str, limit: int) -> str:
    """Return text of at most `limit` characters: the middle gives way, since names differ at their ends."""
    if len(text) <= limit:
        return text
    head = max(0, limit - 1) // 3
    return f"{text[:head]}…{text[len(text) - (limit - 1 - head) :]}"


def table(
    heads: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = (), least: Mapping[str, int] = {}
) -> str:
    """Return rows in columns, as wide as the terminal at most.

    Args:
        heads: of the columns.
        rows: of text.
        right: numbers of the columns that are aligned to the right.
        least: columns that may be shortened, in this order, and to how much.
    """
    widths = [max(map(len, column)) for column in zip(heads, *rows, strict=True)]
    limit = width()
    for head, smallest in least.items() if limit is not None else ():
        if head in heads:
            column = heads.index(head)
            excess = sum(widths) + 2 * (len(widths) - 1) - (limit or 0)
            widths[column] = max(min(smallest, widths[column]), widths[column] - max(0, excess))
    lines = []
    for row in (heads, *rows):
        cells = [fitted(cell, widths[i]) for i, cell in enumerate(row)]
        padded = [c.rjust(widths[i]) if i in right else c.ljust(widths[i]) for i, c in enumerate(cells)]
        lines.append("  ".join(padded).rstrip())
    return "\n".join(lines)
