"""``torch-shard verify``: whether a checkpoint is complete and as it was written."""

from __future__ import annotations

import argparse
from typing import Any

from ..checkpoint.tools.verify import size_to_verify, verify
from .output import print_json, progress, size


def add_to(commands: Any) -> None:
    """Add the command to the parser's commands."""
    parser = commands.add_parser(
        "verify",
        help="read everything, and compare checksums",
        description="Read a whole checkpoint: checksums, sizes, and whether all parts of all tensors are there. "
        "Exit code 0: it is good; 1: it is damaged; 2: there is no checkpoint, or it can't be read.",
    )
    parser.add_argument("checkpoint", metavar="CKPT")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the problems, or that there are none, and return the exit code."""
    total = size_to_verify(arguments.checkpoint)
    with progress(total, "verify") as advance:
        problems = verify(arguments.checkpoint, advance)
    if arguments.json:
        found = [{"file": p.file or None, "entries": p.entries, "problem": p.text} for p in problems]
        print_json({"path": arguments.checkpoint, "good": not problems, "bytes": total, "problems": found})
    elif problems:
        print(f"{arguments.checkpoint} is damaged:")
        for problem in problems:
            print(f"  {problem}")
    else:
        print(f"{arguments.checkpoint} is good ({size(total)} read)")
    return 1 if problems else 0
