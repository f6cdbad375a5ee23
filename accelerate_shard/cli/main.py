"""The command line's arguments, errors and exit codes; what each command does is in a file of its name."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from torch_shard.errors import ShardError
from torch_shard.versions import __version__

from . import config, self_test, show

__all__ = ["main"]

_EXIT = """exit codes:
  config, env   0 done, 2 error
  test          0 the ranks agree, 1 they do not, or the training failed, 2 error in the configuration
  130 where it was interrupted (Ctrl-C)
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line.

    Args:
        argv: arguments without the program's name; those of the process by default.

    Returns:
        The exit code; see ``accelerate-shard --help``.
    """
    try:
        arguments = _parser().parse_args(argv)
        code: int = arguments.run(arguments)
        sys.stdout.flush()
        return code
    except SystemExit as stop:  # argparse: usage, --help, --version
        return stop.code if isinstance(stop.code, int) else 2
    except BrokenPipeError:
        # Whoever read the output has gone; else the interpreter would complain when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ShardError, OSError) as error:
        print(f"accelerate-shard: {error}", file=sys.stderr)
        return 2
    except (KeyboardInterrupt, EOFError) as error:
        said = "interrupted" if isinstance(error, KeyboardInterrupt) else "no answers; --yes takes the defaults"
        print(f"\naccelerate-shard: {said}", file=sys.stderr)
        return 130 if isinstance(error, KeyboardInterrupt) else 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="accelerate-shard",
        description="Write, try and show configurations of sharded training with Accelerate.",
        epilog=_EXIT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"torch-shard-engine {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for module in (config, self_test, show):
        module.add_to(commands)
    return parser
