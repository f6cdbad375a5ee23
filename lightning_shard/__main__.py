"""``python -m lightning_shard [--shard.field=value ...] [-m] program [arguments]``: run a program of Lightning's sharded.

It works in a single process, from which the program starts its other ranks, under torchrun, and on SLURM. ``python -m
lightning_shard fabric run ...`` is ``fabric run ...`` for such a program.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

__all__ = ["main"]

_NAME = "lightning_shard"


def main(argv: Sequence[str] | None = None) -> None:
    """Run the program that a command line names.

    Args:
        argv: arguments without the runner's name; those of the process by default.

    Raises:
        SystemExit: with code 2: the arguments or settings are wrong, which has been said on standard error.
        Exception: what the program raises.
    """
    from torch_shard.errors import ShardError
    from torch_shard.frontend.launch import MISUSED, run_script

    from .registration.registry import namespace_in_use
    from .run._private import run_fabric_cli
    from .run.settings import RUNS, read_settings

    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        settings, rest = read_settings(arguments, os.environ)
        own = arguments[: len(arguments) - len(rest)]
        os.environ[RUNS] = "1"
        if rest[:2] == ["fabric", "run"] and not os.path.exists("fabric"):
            run_fabric_cli(namespace_in_use(fabric=True), rest[1:], _NAME, own)
            return
    except ShardError as error:
        print(f"{_NAME}: {error}", file=sys.stderr)
        raise SystemExit(MISUSED) from None
    options = _parser().parse_args(rest)
    # Ranks may be started after the program has changed its working directory.
    program = ["-m", options.program] if options.module else [os.path.abspath(options.program)]

    def prepare() -> None:
        from .run.takeover import take_over

        take_over(settings, [*own, *program])

    run_script(_NAME, options.program, options.arguments, options.module, prepare)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {_NAME}",
        usage=f"python -m {_NAME} [--shard.FIELD=VALUE ...] [-m] program ...\n"
        f"       python -m {_NAME} [--shard.FIELD=VALUE ...] fabric run ...",
        description="Run a program of Lightning's Trainer or Fabric sharded, whatever strategy it names.",
        epilog=f"torchrun --nproc-per-node 8 -m {_NAME} --shard.strategy=shard_grad_op train.py --lr 1e-4",
    )
    parser.add_argument("-m", "--module", action="store_true", help="the program is a module's name")
    parser.add_argument("program", help="path of a script, or with -m the name of a module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the program's own")
    return parser


if __name__ == "__main__":
    main()
