"""``python -m accelerate_shard [--report FILE] [-m] script [arguments]``: run an unmodified script with sharded models.

It works under ``accelerate launch --config_file x.yaml -m accelerate_shard train.py ...``, under torchrun, and in a single
process. The script finds ``accelerate.Accelerator`` and ``transformers.Trainer`` replaced, and everything else as if Python had
run it.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> None:
    """Run the script that a command line names.

    Args:
        argv: arguments without the program's name; those of the process by default.

    Raises:
        SystemExit: with code 2: the arguments or the launch's settings are wrong, which has been said on standard error.
        Exception: what the script raises.
    """
    options = _parser().parse_args(argv)
    from torch_shard.frontend.launch import run_script

    run_script("accelerate_shard", options.script, options.arguments, options.module, _prepare, options.report)


def _prepare() -> None:
    from .launch.enable import enable
    from .settings.resolve import refuse_other_engines

    refuse_other_engines({})
    enable()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m accelerate_shard",
        description="Run a script that uses Accelerate or transformers.Trainer with sharded models.",
        epilog="accelerate launch --config_file config.yaml -m accelerate_shard train.py --lr 1e-4",
    )
    parser.add_argument("-m", "--module", action="store_true", help="the script is a module's name")
    parser.add_argument(
        "--report", metavar="FILE", help="write a page (.html) with pictures of the training when the script ends"
    )
    parser.add_argument("script", help="path of a script, or with -m the name of a module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own")
    return parser


if __name__ == "__main__":
    main()
