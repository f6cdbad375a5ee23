"""``torch-shard consolidate`` and ``torch-shard convert``: the same checkpoint in another format."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ..checkpoint.format.safetensors import INDEX, SINGLE, size_of
from ..checkpoint.sharded.entry_tree import Stored, leaves
from ..checkpoint.tools.classify import Parts, parts_of
from ..checkpoint.tools.open_any import Opened, open_checkpoint
from ..checkpoint.tools.to_sharded import write_sharded
from ..checkpoint.tools.to_single_file import refuse_to_replace, write_safetensors, write_torch
from ..errors import CheckpointError, ConfigError
from .output import note, print_json, progress, size

__all__ = ["DTYPES", "add_consolidate", "add_convert"]

DTYPES = {
    "bf16": torch.bfloat16,
    "fp16": torch.float16,
    "fp32": torch.float32,
    "fp64": torch.float64,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float32": torch.float32,
    "float64": torch.float64,
}


def add_consolidate(commands: Any) -> None:
    """Add the command to a parser's."""
    parser = commands.add_parser(
        "consolidate",
        help="make one file of a sharded checkpoint",
        description="Make one file of a sharded checkpoint, one tensor at a time. A torch file holds the state dict alone where "
        'there is nothing else, or {"model", "optimizer", "extra"}, the optimizer as optimizer.state_dict() has it; of a '
        "Lightning checkpoint it is one that a Trainer loads. safetensors holds the model.",
    )
    parser.add_argument("checkpoint", metavar="CKPT")
    parser.add_argument("output", metavar="OUT", help="a file, or for safetensors a directory")
    parser.add_argument(
        "--format",
        choices=("torch", "safetensors"),
        help="default: safetensors if OUT ends in .safetensors or is a directory, else torch",
    )
    _add_options(parser)
    parser.set_defaults(run=run_consolidate)


def add_convert(commands: Any) -> None:
    """Add the command to a parser's."""
    parser = commands.add_parser(
        "convert",
        help="write a checkpoint in another format",
        description="Write a checkpoint of any format in another one, one tensor at a time. engine.load reads the sharded one.",
    )
    parser.add_argument("checkpoint", metavar="SRC")
    parser.add_argument("output", metavar="DST")
    parser.add_argument("--to", choices=("sharded", "torch", "safetensors"), required=True, dest="format")
    _add_options(parser)
    parser.set_defaults(run=run)


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--dtype", choices=tuple(DTYPES), metavar="DTYPE", help=f"of the model's floats: {', '.join(DTYPES)}"
    )
    parser.add_argument("--model-only", action="store_true", help="leave optimizers and everything else out")
    parser.add_argument(
        "--max-shard-size",
        default="5GB",
        metavar="SIZE",
        help="of one safetensors file in a directory, such as 5GB or 512MiB (default: 5GB)",
    )
    parser.add_argument("--overwrite", action="store_true", help="replace what is there")


def run_consolidate(arguments: argparse.Namespace) -> int:
    """Choose the format, and write."""
    if arguments.format is None:
        output = arguments.output
        folder = output.endswith(os.sep) or os.path.isdir(output)
        arguments.format = "safetensors" if folder or output.endswith(".safetensors") else "torch"
    return run(arguments)


def run(arguments: argparse.Namespace) -> int:
    """Write the checkpoint, and print what was written."""
    target = Path(os.path.abspath(arguments.output))
    try:
        limit = size_of(arguments.max_shard_size, "--max-shard-size")
    except OverflowError as error:
        raise ConfigError(
            f"--max-shard-size {arguments.max_shard_size[:20]}... is too large; give one such as 5GB."
        ) from error
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
    left_out = _left_out(opened, parts) if model_only and not arguments.model_only else []
    dtype = DTYPES.get(arguments.dtype)
    stored = list(_distinct(parts))
    with progress(sum(own.nbytes for own in stored), arguments.format) as advance:
        if arguments.format == "torch":
            write_torch(opened, parts, target, model_only=model_only, dtype=dtype, progress=advance)
        elif arguments.format == "safetensors":
            left_out += write_safetensors(parts, target, dtype=dtype, max_shard_size=limit, progress=advance)
        else:
            write_sharded(opened, parts, target, dtype=dtype, progress=advance)
    files = sorted(target.iterdir()) if target.is_dir() else [target]
    if arguments.format == "safetensors":  # beside which a directory may hold others
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
        note(f"not in the output, since safetensors holds named tensors only: {', '.join(left_out)}")
    return 0


def _refuse(target: Path, arguments: argparse.Namespace) -> None:
    if not target.name:
        raise ConfigError(f"{arguments.output!r} is no place for a checkpoint; give a file or directory of its own.")
    if arguments.format == "safetensors" and target.is_dir():
        for name in (SINGLE, INDEX):  # a directory may hold other files, such as a config
            refuse_to_replace(target / name, arguments.overwrite)
    else:
        refuse_to_replace(target, arguments.overwrite)


def _distinct(parts: Parts) -> Iterator[Stored]:
    """Yield the tensors that will be read, tied ones once."""
    seen = set()
    optimizers = [own.state for own in parts.optimizers.values()]
    for _, leaf in leaves([parts.model, parts.models, optimizers, parts.extra, parts.other]):
        if isinstance(leaf, Stored) and leaf.place not in seen:
            seen.add(leaf.place)
            yield leaf


def _left_out(opened: Opened, parts: Parts) -> list[str]:
    """Return what a checkpoint has beside its models."""
    kept = {id(leaf) for _, leaf in leaves([parts.model, parts.models])}
    names = (str(path[0]) for path, leaf in leaves(opened.tree) if id(leaf) not in kept)
    return list(dict.fromkeys(names))
