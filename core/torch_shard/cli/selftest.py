"""``torch-shard selftest``: a check of the engine on this machine's devices, and a report."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
import time
from collections.abc import Iterator
from typing import Any

import torch
from tqdm import tqdm

from ..config.checks import check_number
from ..errors import UnavailableError
from .output import print_json


def add_to(commands: Any) -> None:
    """Add the command to the parser's commands."""
    parser = commands.add_parser(
        "selftest",
        help="check the engine on this machine",
        description="Train small models on this machine's devices, compare numbers, memory and speed with plain training, the "
        "plan, DDP and FSDP2, and write a report that can be attached to a bug report: it names no machine, user or path. "
        "Exit code 0: what was checked is good; 1: something failed; 2: an error, or nothing could be checked.",
    )
    parser.add_argument(
        "--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: GPUs if there are any"
    )
    parser.add_argument("--ranks", type=int, metavar="N", help="default: one for each GPU, or two on the CPU")
    parser.add_argument(
        "--share-gpus",
        action="store_true",
        help="let ranks share GPUs if there are too few; nothing is timed then",
    )
    parser.add_argument(
        "--quick", action="store_true", help="small models and few rounds: about a minute on two CPU cores"
    )
    parser.add_argument("--only", metavar="PARTS", help="some of: correctness,streams,memory,speed,offload")
    parser.add_argument("--case", default="*", metavar="GLOB", help="run the cases whose names match")
    parser.add_argument("--report", metavar="FILE.html", help="write this file, and FILE.json beside it")
    parser.add_argument(
        "--peak-tflops", type=float, metavar="T", help="a device's peak in bf16 for MFU, if it is not known"
    )
    parser.add_argument(
        "--timeout", type=float, metavar="S", help="for each part (default: 1800 s, with --quick 600 s)"
    )
    parser.add_argument(
        "--tests", action="store_true", help="run tests/gpu of the checkout in the current folder instead"
    )
    parser.set_defaults(run=run)


@contextlib.contextmanager
def _ended_by_signals() -> Iterator[None]:
    """Return a context in which a signal that ends this program ends its ranks, too, as Ctrl-C does."""
    signals = {signal.SIGTERM, getattr(signal, "SIGHUP", signal.SIGTERM)}
    before = {number: signal.signal(number, signal.default_int_handler) for number in signals}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def run(arguments: argparse.Namespace) -> int:
    """Run the self-test, print the verdict, and return the exit code."""
    if not torch.distributed.is_available():
        raise UnavailableError("this build of torch has no torch.distributed, which ranks need; install another one.")
    # These import FSDP2 and torch's launcher, which the other commands do without.
    from ..selftest.gpu_tests import run_gpu_tests
    from ..selftest.report import Report
    from ..selftest.session import Session, checked_parts, checked_setting
    from ..utils.html_page import check_path

    if arguments.tests:
        return run_gpu_tests()
    setting = checked_setting(
        arguments.device, arguments.ranks, arguments.quick, arguments.peak_tflops, arguments.share_gpus
    )
    path = None if arguments.report is None else check_path("--report", arguments.report, (".json",))
    seconds = (600.0 if arguments.quick else 1800.0) if arguments.timeout is None else arguments.timeout
    check_number("--timeout", seconds, "seconds")
    session = Session(setting, checked_parts(arguments.only), arguments.case, seconds)
    began = time.monotonic()
    results: list[Any] = []

    def report() -> Report:
        return Report(setting, session.environment, results, time.monotonic() - began)

    # With disable=None it shows on a terminal only.
    bar = tqdm(total=len(session.cases()), desc="selftest", unit="case", leave=False, disable=None)
    with _ended_by_signals(), bar:

        def advance(case: Any) -> None:
            bar.set_postfix_str(f"{case.part}: {case.name}", refresh=False)
            bar.update()

        session.advance = advance
        try:
            for part in session.parts:
                is_first = not results
                results += session.run(part)
                if not arguments.json and report().part(part):
                    bar.write("\n".join([*([report().title, ""] if is_first else []), *report().part(part)]))
                    sys.stdout.flush()
        except KeyboardInterrupt:
            if path is not None and results:
                report().write(path)  # of the parts that have ended
            raise
    found = report()
    if session.output:
        print(f"torch-shard: the ranks' last lines in the launch that failed:\n{session.output}\n", file=sys.stderr)
    if arguments.json:
        print_json(found.plain())
    else:
        print("\n".join(found.conclusion), flush=True)
    if path is not None:  # last: a full disk should not cost the verdict
        found.write(path)
        if not arguments.json:
            print(f"report: {path}")
    return found.exit_code
