"""``python -m accelerate_shard [-m] script [arguments]``: run an unmodified script with sharded models.

It works under ``accelerate launch --config_file x.yaml -m accelerate_shard train.py ...``, under torchrun, and in a single
process. The script finds ``accelerate.Accelerator`` and ``transformers.Trainer`` replaced, and everything else as if Python had
run it.
"""

from __future__ import annotations

import argparse
import os
import runpy
import sys
from collections.abc import Sequence
from types import TracebackType

__all__ = ["main"]

_MISUSED = 2


def main(argv: Sequence[str] | None = None) -> None:
    """Run the script that a command line names.

    Args:
        argv: arguments without the program's name; those of the process by default.

    Raises:
        SystemExit: with code 2: the arguments or the launch's settings are wrong, which has been said on standard error.
        Exception: what the script raises.
    """
    options = _parser().parse_args(argv)
    from torch_shard.errors import ShardError

    from .launch.enable import enable
    from .settings.resolve import refuse_other_engines

    try:
        refuse_other_engines({})
        enable()
    except ShardError as error:
        if os.environ.get("RANK", "0") == "0":  # the error is the same on all ranks
            print(f"accelerate_shard: {error}", file=sys.stderr)
        raise SystemExit(_MISUSED) from None
    if not options.module and not os.path.exists(options.script):
        print(f"accelerate_shard: there is no script {options.script!r}.", file=sys.stderr)
        raise SystemExit(_MISUSED)
    sys.excepthook = _without_runner(sys.excepthook)
    sys.argv = [options.script, *options.arguments]
    if options.module:
        runpy.run_module(options.script, run_name="__main__", alter_sys=True)
    else:
        # Python puts a script's folder here; under -m it is the working directory.
        sys.path[0] = os.path.dirname(os.path.realpath(options.script))
        runpy.run_path(options.script, run_name="__main__")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m accelerate_shard",
        description="Run a script that uses Accelerate or transformers.Trainer with sharded models.",
        epilog="accelerate launch --config_file config.yaml -m accelerate_shard train.py --lr 1e-4",
    )
    parser.add_argument("-m", "--module", action="store_true", help="the script is a module's name")
    parser.add_argument("script", help="path of a script, or with -m the name of a module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own")
    return parser


def _without_runner(report):  # type: ignore[no-untyped-def]
    """Return `report`, an excepthook, changed so that tracebacks begin in the script."""

    def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        begins = trace
        while begins is not None and _is_runner(begins.tb_frame.f_code.co_filename):
            begins = begins.tb_next
        # Python's own hook uses the exception's traceback, others use the argument.
        report(kind, error.with_traceback(begins or trace), begins or trace)

    return excepthook


def _is_runner(file: str) -> bool:
    return file in (__file__, runpy.__file__, "<frozen runpy>")


if __name__ == "__main__":
    main()
