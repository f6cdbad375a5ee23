"""``torch-shard diff``: the differences of two checkpoints of any formats."""

from __future__ import annotations

import argparse
from typing import Any

from ..checkpoint.sharded.entry_tree import Stored
from ..checkpoint.tools.classify import Parts, parts_of
from ..checkpoint.tools.diff import Difference, aligned, compare
from ..checkpoint.tools.open_any import open_checkpoint
from ..errors import CheckpointError, ConfigError
from .output import plain, print_json, progress, short


def add_to(commands: Any) -> None:
    """Add the command to the parser's commands."""
    parser = commands.add_parser(
        "diff",
        help="compare two checkpoints",
        description="Compare two checkpoints of any formats, tensor by tensor. "
        "Exit code 0: they are equal; 1: they differ; 2: one can't be read.",
    )
    parser.add_argument("a", metavar="A")
    parser.add_argument("b", metavar="B")
    parser.add_argument("--rtol", type=float, default=0.0, help="relative tolerance (default: 0, to the bit)")
    parser.add_argument("--atol", type=float, default=0.0, help="absolute tolerance (default: 0, to the bit)")
    parser.add_argument("--ignore-dtype", action="store_true", help="compare the values of tensors of different dtypes")
    parser.add_argument("--model-only", action="store_true", help="compare nothing but the models")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the differences, and return the exit code."""
    if not (arguments.rtol >= 0 and arguments.atol >= 0):
        raise ConfigError("--rtol and --atol must not be negative.")
    a, b = aligned(_parts(arguments.a, arguments.model_only), _parts(arguments.b, arguments.model_only))
    total = sum(value.nbytes for value in a.values() if isinstance(value, Stored))
    with progress(total, "diff") as advance:
        limits = {"rtol": arguments.rtol, "atol": arguments.atol}
        found = list(compare(a, b, **limits, dtypes=not arguments.ignore_dtype, progress=advance))
    if arguments.json:
        names = {"a": arguments.a, "b": arguments.b}
        common = len(a.keys() & b.keys())
        print_json({**names, "equal": not found, "compared": common, "differences": list(map(vars, found))})
    elif found:
        for own in found:
            print(_line(own))
        print(f"{len(found)} of {len(a.keys() | b.keys())} entries differ")
    else:
        print(f"equal ({len(a)} entries)")
    return 1 if found else 0


def _parts(path: str, model_only: bool) -> Parts:
    parts = parts_of(open_checkpoint(path), model_only=model_only)
    if parts.refused:
        raise CheckpointError(f"{parts.refused[0]} --model-only compares nothing but the models.")
    return parts


def _line(own: Difference) -> str:
    if own.kind.startswith("only"):
        value = own.a if own.kind == "only in A" else own.b
        return f"{own.kind}: {own.name} {_described(value)}".rstrip()
    if own.kind == "values":
        return f"values: {own.name}: {own.elements:,} of {own.total:,} elements, at most {own.max_abs:.6g} apart"
    if own.kind == "dtype":
        apart = f"{own.elements:,} of {own.total:,} elements differ, at most {own.max_abs:.6g} apart"
        return f"dtype: {own.name}: {plain(own.a)} and {plain(own.b)}; {apart}"
    return f"{own.kind}: {own.name}: {short(own.a)} and {short(own.b)}"


def _described(value: Any) -> str:
    if isinstance(value, dict) and value.keys() == {"shape", "dtype"}:
        return f"{value['shape']} {plain(value['dtype'])}"
    return short(value)
