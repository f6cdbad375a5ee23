"""The runner ``python -m torch_shard script``."""

from __future__ import annotations

import argparse
import functools
import os
from collections.abc import Mapping, Sequence
from typing import Any

from ..errors import ConfigError
from ..frontend.launch import MISUSED, read_arguments, read_variables, run_script, values_of
from .settings import RUNNER_SETTINGS

_DESCRIPTION = """Run a script that trains with DistributedDataParallel, or with --shard.fsdp one that trains with torch's FSDP,
unedited and with sharded models. Start it as the script itself would be started: torchrun --nproc-per-node 8 -m torch_shard
train.py --lr 1e-4. With a command of torch-shard in place of the script (inspect, verify, consolidate, convert, diff, plan,
selftest) it does what torch-shard does."""


def main(argv: Sequence[str]) -> None:
    """Run the script that a command line names. Not collective.

    Args:
        argv: the arguments, without the program's name.

    Raises:
        SystemExit: with code 2: the arguments or the settings are wrong. The message is on standard error.
        Exception: what the script raises.
    """
    parser = _parser()
    try:
        found, rest = read_arguments(argv, RUNNER_SETTINGS, os.environ)
        settings = values_of(read_variables(os.environ, RUNNER_SETTINGS)) | values_of(found)
    except ConfigError as error:
        parser.exit(MISUSED, f"torch_shard: {error}\n")
    options = parser.parse_args(rest)
    prepare = functools.partial(_prepare, settings)
    run_script("torch_shard", options.script, options.arguments, options.module, prepare, options.report)


def _prepare(settings: Mapping[str, Any]) -> None:
    from ..frontend.zero_redundancy_optimizer import replace_zero_redundancy_optimizer
    from .replace import replace_ddp, replace_fsdp
    from .settings import Overrides

    overrides = Overrides(settings)
    replace_ddp(overrides)
    replace_zero_redundancy_optimizer()
    if overrides.fsdp:
        replace_fsdp(overrides)


def _parser() -> argparse.ArgumentParser:
    settings = "\n".join(f"  --shard.{each.field}=...  {each.form}" for each in RUNNER_SETTINGS)
    parser = argparse.ArgumentParser(
        prog="python -m torch_shard",
        usage="python -m torch_shard [--shard.FIELD=VALUE ...] [--report FILE] [-m] script [argument ...]",
        description=_DESCRIPTION,
        epilog=f"settings, which may also be variables of the environment (SHARD_STRATEGY=...):\n{settings}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-m", "--module", action="store_true", help="the script is a module's name")
    parser.add_argument(
        "--report", metavar="FILE", help="write a page (.html) with pictures of the training when the script ends"
    )
    parser.add_argument("script", help="the path of a script, or with -m the name of a module")
    parser.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own")
    return parser
