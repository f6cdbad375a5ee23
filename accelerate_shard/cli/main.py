"""The command line: arguments, errors and exit codes. Each command has a file of its own."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from torch_shard.errors import ShardError
from torch_shard.versions import __version__

from . import config, show


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line.

    Args:
        argv: arguments without the program's name; those of the process by default.

    Returns:
        The exit code: 0 done, 2 error.
    """
    try:
        arguments = _parser().parse_args(argv)
        return int(arguments.run(arguments))
    except SystemExit as stop:  # argparse: usage, --help, --version
        return stop.code if isinstance(stop.code, int) else 2
    except (ShardError, OSError) as error:
        print(f"accelerate-shard: {error}", file=sys.stderr)
        return 2
    except EOFError:
        print("\naccelerate-shard: no answers; --yes takes the defaults", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="accelerate-shard",
        description="Write and show configurations of sharded training with Accelerate.",
        epilog="exit codes: 0 done, 2 error",
    )
    parser.add_argument("--version", action="version", version=f"torch-shard-engine {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for module in (config, show):
        module.add_to(commands)
    return parser
