"""The command line's arguments, errors and exit codes. Each command has a file of its name."""

from __future__ import annotations

import argparse
import io
import os
import sys
from collections.abc import Sequence

import torch

from ..checkpoint.safe_globals import classes_of_data
from ..errors import ShardError
from ..versions import __version__
from . import convert, diff, inspect, plan, selftest, verify

COMMANDS = ("inspect", "verify", "consolidate", "convert", "diff", "selftest", "plan")

_EXIT = """exit codes:
  inspect, consolidate, convert   0 done, 2 error
  verify                          0 good, 1 damaged, 2 error: no checkpoint there, or it can't be read
  diff                            0 equal, 1 different, 2 error
  plan                            0 something fits, 1 nothing does, 2 error
  selftest                        0 good, 1 something failed, 2 error, or nothing could be checked here
  130 where it was interrupted (Ctrl-C)

formats:
  sharded      a directory of this package, or of torch.distributed.checkpoint (FSDP2, DDP, torchtitan, Lightning)
  torch        one file of torch.save: a state dict, {"model", "optimizer", "extra"}, or Lightning's .ckpt
  safetensors  one file, or a directory with model.safetensors or model.safetensors.index.json

With --json one JSON object goes to standard output and nothing else. Errors go to standard error. Nothing in a checkpoint
is ever run: objects are unpickled by torch's loader, which only makes data.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command line.

    Args:
        argv: the arguments without the program's name; by default those of the process.

    Returns:
        The exit code; see ``torch-shard --help``.
    """
    arguments = None
    for stream in (sys.stdout, sys.stderr):  # a terminal's encoding may lack characters of names in a checkpoint
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")
    try:
        own, of_script = plan.split(sys.argv[1:] if argv is None else argv)
        arguments = _parser().parse_args(own)
        arguments.script_arguments = of_script
        with torch.serialization.safe_globals(classes_of_data()):
            code: int = arguments.run(arguments)
        sys.stdout.flush()
        return code
    except SystemExit as stop:  # raised by argparse for usage errors, --help and --version
        return stop.code if isinstance(stop.code, int) else 2
    except BrokenPipeError:
        # The reader of the output has closed it. Without this the interpreter would complain when it flushes at its end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 141
    except (ShardError, OSError) as error:
        advice = (
            "" if isinstance(error, ShardError) else ". Check the path, its permissions and the free space of its disk."
        )
        print(f"torch-shard: {_one_line(error)}{advice}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("torch-shard: interrupted", file=sys.stderr)
        return 130
    except Exception as error:  # exit code 1 would mean that a checkpoint is damaged or different
        given = vars(arguments) if arguments is not None else {}
        paths = " and ".join(given[key] for key in ("checkpoint", "a", "b") if key in given)
        text = f"{type(error).__name__}: {_one_line(error)}"
        if paths:
            text = f"{paths} can't be read or written here ({text}). Save it as plain tensors, or report this as an error of"
        else:
            text = f"{text}. Report this as an error of"
        print(f"torch-shard: {text} torch-shard.", file=sys.stderr)
        return 2


def _one_line(error: Exception) -> str:
    return "; ".join(line.strip() for line in str(error).splitlines() if line.strip()) or type(error).__name__


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="torch-shard",
        description="Look at checkpoints, check, convert and compare them; check the engine on this machine; plan a training.",
        epilog=_EXIT,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    version = f"torch-shard-engine {__version__} (torch {torch.__version__})"
    parser.add_argument("--version", action="version", version=version)
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for module in (inspect, verify, convert, diff, selftest, plan):
        module.add_to(commands)
    for command in commands.choices.values():
        command.add_argument("--json", action="store_true", help="print one JSON object")
    return parser
