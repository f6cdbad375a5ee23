"""Runs Lightning's own distributed tests under DDP and under this strategy, on the CPU, and compares.

    python tools/lightning_suite CHECKOUT [--start spawn] [--only REGEX] [--json FILE]

CHECKOUT is a copy of Lightning's repository at the installed version. Its tests are copied twice into a temporary folder;
in the second copy every name of DDP (``"ddp"``, ``"ddp_spawn"``, ``"ddp_fork"``, ...) is one of ours instead, the class
``DDPStrategy`` is ours, and so is the strategy that Lightning chooses for several devices by default. Of both, those tests run
that name DDP, or several devices and no strategy, each in a process of its own, and those that Lightning marks as standalone
each under a pytest of their own. A test counts if, in the first copy, it took one of DDP's names from a registry of strategies.

``ddp_spawn`` becomes ``ddp_fork`` and ``shard_fork``, which need no import of everything in each rank of each test. The few
tests that fail so under DDP, since they assert how processes start, run once more with ``ddp_spawn`` and ``shard_spawn``.
With ``--start spawn`` all tests run like that.

Needs what Lightning's tests need: pytest, cloudpickle, scikit-learn, tensorboard, tensorboardX, psutil and what else its
``requirements/{pytorch,fabric}/test.txt`` name. The exit status is 1 if a test passes under DDP only.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path

import pytest
from excluded import EXCLUDED, REFUSED
from rewrite import functions_that_change, renamed, rewritten

HERE = Path(__file__).resolve().parent
PACKAGES = ("tests_pytorch", "tests_fabric")
STANDALONE = "Requires: [Standalone execution]"


@dataclass
class Ending:
    """How a case ended: passed, failed, skipped or xfailed, and which strategies it took from a registry."""

    id: str
    outcome: str
    reason: str
    asked: list[str]
    seconds: float
    case: str


def main() -> int:
    options = _options()
    ddp: dict[str, Ending] = {}
    shard: dict[str, Ending] = {}
    wanted = functions_to_run(options.checkout, options.only)
    for start in ("spawn",) if options.start == "spawn" else ("fork", "spawn"):
        for family, endings in (("ddp", ddp), ("shard", shard)):
            with tempfile.TemporaryDirectory(prefix="lightning-suite-") as folder:
                _copy(options.checkout, Path(folder), family, start)
                endings |= _run(Path(folder), wanted, options.timeout, family)
        wanted = [case for case in ddp if ddp[case].outcome == "failed"]
    results = compare(ddp, shard)
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    print(table(results))
    return 1 if results["with DDP only"] else 0


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("checkout", type=Path, help="Lightning's repository, at the version that is installed")
    parser.add_argument("--start", choices=("fork", "spawn"), default="fork", help='how "ddp_spawn" starts ranks')
    parser.add_argument("--only", type=re.compile, default=re.compile(""), metavar="REGEX", help="of path::function")
    parser.add_argument("--timeout", type=int, default=90, help="seconds for a test (Lightning's own CI: 90)")
    parser.add_argument("--json", type=Path, help="write every test's result there, with the errors")
    options = parser.parse_args()
    for package in PACKAGES:
        if not (options.checkout / "tests" / package / "conftest.py").is_file():
            parser.error(f"{options.checkout} is no checkout of Lightning: there is no tests/{package}")
    return options


def functions_to_run(checkout: Path, only: re.Pattern[str]) -> list[str]:
    """The tests that name DDP or get it, as ``tests/package/path::function``, without those of :data:`EXCLUDED`."""
    functions = []
    for package in PACKAGES:
        for path in sorted((checkout / "tests" / package).rglob("test_*.py")):
            names = sorted(functions_that_change(path.read_text()))
            functions += [f"{path.relative_to(checkout).as_posix()}::{name}" for name in names]
    return [function for function in functions if only.search(function) and _key(function) not in EXCLUDED]


def _copy(checkout: Path, root: Path, family: str, start: str) -> None:
    """Copy the tests, with DDP's names replaced by those of a family of strategies."""
    shutil.copytree(checkout / "tests", root / "tests")
    shutil.copy(checkout / "pyproject.toml", root)  # pytest's settings
    for package in PACKAGES:
        for path in (root / "tests" / package).rglob("*.py"):
            path.write_text(rewritten(path.read_text(), family, start))


def _key(case: str) -> str:
    """``tests_pytorch/test_x.py::test_y`` of a function or case: as :data:`EXCLUDED` has it."""
    return case.removeprefix("tests/").partition("#")[0]


def _run(root: Path, wanted: list[str], timeout: int, family: str) -> dict[str, Ending]:
    endings: dict[str, Ending] = {}
    for package in PACKAGES:
        of_package = [case for case in wanted if _key(case).startswith(package)]
        if of_package:
            endings |= _pytest(root, of_package, timeout, LIGHTNING_SUITE_FAMILY=family)
    for case, ending in list(endings.items()):
        if STANDALONE in ending.reason:
            endings |= _pytest(root, [case], timeout, LIGHTNING_SUITE_FAMILY=family, PL_RUN_STANDALONE_TESTS="1")
    return endings


def _pytest(root: Path, cases: list[str], timeout: int, **environment: str) -> dict[str, Ending]:
    wanted, results = root / "cases.txt", root / "results.jsonl"
    wanted.write_text("\n".join(cases))
    results.write_text("")
    environment |= {
        "LIGHTNING_SUITE_CASES": str(wanted),
        "LIGHTNING_SUITE_RESULTS": str(results),
        "LIGHTNING_SUITE_TIMEOUT": str(timeout),
    }
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, (str(HERE), os.environ.get("PYTHONPATH"))))
    files = sorted({str(root / case.partition("::")[0]) for case in cases})
    # Lightning's settings, but without --doctest-modules, since no doctest names DDP, and not taking for errors what a torch
    # newer than the tests deprecates.
    settings = ["-o", "addopts=--continue-on-collection-errors", "-W", "default::FutureWarning"]
    settings += ["-p", "suite_plugin", "-p", "no:cacheprovider", "-q"]
    folder = root / "tests" / _key(cases[0]).partition("/")[0]  # as Lightning's own CI
    run = subprocess.run(
        [sys.executable, "-m", "pytest", *files, *settings],
        cwd=folder,
        env=os.environ | environment,
        check=False,
        stdout=subprocess.PIPE,
        text=True,
    )
    if run.returncode not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        print(run.stdout, file=sys.stderr)  # a file that cannot be imported; tests report to the plugin
    endings = [Ending(**json.loads(line)) for line in results.read_text().splitlines()]
    return {ending.case: ending for ending in endings}


def compare(ddp: dict[str, Ending], shard: dict[str, Ending]) -> dict[str, list[dict[str, str]]]:
    """Sort the cases that are distributed under DDP by how they ended on the two sides."""
    results: dict[str, list[dict[str, str]]] = defaultdict(list)
    for case, first in ddp.items():
        second = shard.get(case, Ending(first.id, "failed", "was not collected", [], 0.0, case))
        if first.outcome == "skipped" and not first.asked:
            group, reason = "skipped", first.reason
        elif first.outcome == "passed" and not any(map(renamed, first.asked)):
            continue  # with this set of parameters DDP is neither asked for nor chosen
        elif first.outcome == second.outcome != "failed":
            group, reason = "with both", ""
        elif first.outcome == "failed":
            group, reason = ("with neither" if second.outcome == "failed" else "with shard only"), first.reason
        elif _key(case) in REFUSED:
            group, reason = "refused here", REFUSED[_key(case)]
        else:
            group, reason = "with DDP only", second.reason
        results[group].append({"test": first.id.removeprefix("tests/"), "reason": reason})
    return results


def table(results: dict[str, list[dict[str, str]]]) -> str:
    """The comparison in Markdown."""
    from lightning import __version__ as lightning
    from torch import __version__ as torch

    reasons = Counter(row["reason"].removeprefix("Skipped: ") for row in results["skipped"])
    ran = ("with both", "with DDP only", "refused here", "with shard only", "with neither")
    lines = [f"Lightning {lightning}, torch {torch}", "", "| passed | tests |", "| --- | --- |"]
    lines += [f"| {group} | {len(results[group])} |" for group in ran]
    lines += [f"| skipped | {sum(reasons.values())} |", f"| excluded (functions) | {len(EXCLUDED)} |"]
    for group in ran[1:]:
        if results[group]:
            lines += ["", f"{group.capitalize()}:", ""]
            lines += [f"- `{row['test']}`: {_last_line(row['reason'])}" for row in results[group]]
    lines += ["", "Skipped:", "", *(f"- {count}: {reason}" for reason, count in reasons.most_common())]
    lines += ["", "Excluded:", "", *(f"- `{function}`: {reason}" for function, reason in EXCLUDED.items())]
    return "\n".join(lines)


def _last_line(reason: str) -> str:
    errors = [line[1:].strip() for line in reason.splitlines() if line.startswith("E ")]
    return (errors or reason.splitlines() or ["?"])[-1][:200]


if __name__ == "__main__":
    sys.exit(main())
