"""``torch-shard consolidate`` and ``torch-shard convert``: the same checkpoint in another format."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.format.manifest import dtype_name
from ..checkpoint.format.safetensors import INDEX, SINGLE, size_of
from ..checkpoint.sharded.entry_tree import Stored, leaves
from ..checkpoint.tools.classify import Parts, parts_of
from ..checkpoint.tools.open_any import open_checkpoint
from ..checkpoint.tools.to_sharded import write_sharded
from ..checkpoint.tools.to_single_file import write_safetensors, write_torch
from ..errors import CheckpointError, ConfigError
from .output import print_json, progress, size

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32, "fp64": torch.float64}
_DTYPES |= {dtype_name(dtype): dtype for dtype in _DTYPES.values()}


def add_to(commands: Any) -> None:
    """Add both commands to the parser's commands."""
    consolidate = commands.add_parser(
        "consolidate",
        help="make one file of a sharded checkpoint",
        description="Make one file of a sharded checkpoint, one tensor at a time. A torch file holds the state dict alone where "
        'there is nothing else, or {"model", "optimizer", "extra"}, the optimizer as optimizer.state_dict() has it; of a '
        "Lightning checkpoint it is one that a Trainer loads. safetensors holds the model.",
    )
    convert = commands.add_parser(
        "convert",
        help="write a checkpoint in another format",
        description="Write a checkpoint of any format in another one, one tensor at a time. engine.load reads the sharded one.",
    )
    for parser, names in ((consolidate, ("CKPT", "OUT")), (convert, ("SRC", "DST"))):
        parser.add_argument("checkpoint", metavar=names[0])
        parser.add_argument("output", metavar=names[1], help="a file, or a directory for sharded and safetensors")
        parser.add_argument(
            "--dtype", choices=tuple(_DTYPES), metavar="DTYPE", help=f"of the model's floats: {', '.join(_DTYPES)}"
        )
        parser.add_argument("--model-only", action="store_true", help="leave optimizers and everything else out")
        parser.add_argument(
            "--max-shard-size",
            default="5GB",
            metavar="SIZE",
            help="of one safetensors file in a directory, such as 5GB or 512MiB (default: 5GB)",
        )
        parser.add_argument("--overwrite", action="store_true", help="replace what is there")
        parser.set_defaults(run=run)
    consolidate.add_argument(
        "--format",
        choices=("torch", "safetensors"),
        help="default: safetensors if OUT ends in .safetensors or is a directory, else torch",
    )
    convert.add_argument("--to", choices=("sharded", "torch", "safetensors"), required=True, dest="format")


def run(arguments: argparse.Namespace) -> int:
    """Write the checkpoint, print what was written, and return the exit code."""
    target = Path(os.path.abspath(arguments.output))
    if arguments.format is None:
        in_folder = arguments.output.endswith((os.sep, ".safetensors")) or target.is_dir()
        arguments.format = "safetensors" if in_folder else "torch"
    limit = size_of(arguments.max_shard_size, "--max-shard-size")
    _refuse(target, arguments)
    opened = open_checkpoint(arguments.checkpoint)
    model_only = arguments.model_only or arguments.format == "safetensors"
    parts = parts_of(opened, model_only=model_only)
    if parts.refused:
        raise CheckpointError(f"{parts.refused[0]} --model-only leaves everything but the model out.")
    if model_only and not parts.model and not parts.models:
        raise CheckpointError(
            f"{opened.path} has no model that is known by its place: {', '.join(map(str, opened.tree))}."
        )
    left_out = [] if arguments.model_only else parts.left_out
    dtype = _DTYPES.get(arguments.dtype)
    if dtype is not None:
        parts.convert(dtype)
    stored = list(_distinct(parts))
    with progress(sum(own.nbytes for own in stored), arguments.format) as advance:
        if arguments.format == "torch":
            write_torch(opened, parts, target, advance)
        elif arguments.format == "safetensors":
            left_out += write_safetensors(parts, target, limit, advance)
        else:
            write_sharded(opened, parts, target, advance)
    files = sorted(target.iterdir()) if target.is_dir() else [target]
    if arguments.format == "safetensors":  # a directory may hold other files, too
        files = [file for file in files if file.suffix == ".safetensors" or file.name == INDEX]
    found = {
        "source": str(opened.path),
        "target": str(target),
        "format": arguments.format,
        "dtype": dtype,
        "lightning": parts.lightning,
        "tensors": len(stored),
        "bytes": sum(file.stat().st_size for file in files if file.is_file()),
        "files": [file.name for file in files],
        "left_out": left_out,
    }
    if arguments.json:
        print_json(found)
    else:
        print(f"wrote {target}: {len(stored)} tensors, {size(found['bytes'])}")
    if left_out:
        text = f"not in the output, since safetensors holds named tensors only: {', '.join(left_out)}"
        print(f"torch-shard: {text}", file=sys.stderr)
    return 0


def _refuse(target: Path, arguments: argparse.Namespace) -> None:
    """Raise if the target exists and --overwrite was not given."""
    if not target.name:
        raise ConfigError(f"{arguments.output!r} is no place for a checkpoint; give a file or directory of its own.")
    # A directory of safetensors may hold other files, such as a configuration.
    names = (SINGLE, INDEX) if arguments.format == "safetensors" and target.is_dir() else ("",)
    there = next((target / name for name in names if os.path.lexists(target / name)), None)
    if there is not None and not arguments.overwrite:
        raise ConfigError(f"{there} exists. Give another path, or --overwrite to replace it.")


def _distinct(parts: Parts) -> Iterator[Stored]:
    """Yield the tensors that will be read, tied tensors once."""
    seen = set()
    optimizers = [own.state for own in parts.optimizers.values()]
    for _, leaf in leaves([parts.model, parts.models, optimizers, parts.extra, parts.other]):
        if isinstance(leaf, Stored) and leaf.place not in seen:
            seen.add(leaf.place)
            yield leaf
