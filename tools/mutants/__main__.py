"""See the package's docstring, or ``python -m tools.mutants --help``."""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import sys
import time
from bisect import bisect_right
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path

import attrs
from cosmic_ray.mutating import mutate_and_test
from cosmic_ray.work_db import WorkDB
from cosmic_ray.work_item import TestOutcome, WorkerOutcome, WorkItem, WorkResult

import tools.mutants
from tools.mutants import reach, report, tree
from tools.mutants.draw import draw, function, lines
from tools.mutants.judge import Verdict, judge
from tools.mutants.record import read
from tools.mutants.sessions import killers, session, unreliable, verdict_of

STEPS = ("record", "draw", "quick", "exhaustive", "confirm", "report")


def main() -> int:
    parser = argparse.ArgumentParser(
        "tools.mutants", description=tools.mutants.__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "steps", nargs="*", metavar="STEP", choices=[*STEPS, []], help=f"{', '.join(STEPS)}; all without any"
    )
    parser.add_argument("--only", default="", help="numbers of mutants, with commas")
    parser.add_argument("--again", action="store_true", help="run mutants that survived once more")
    parser.add_argument("--tests", default="", help="record the tests of these files or folders only")
    text = "of tests for each mutant at most, as recorded; one that survives them stays open, and goes on there the next time"
    parser.add_argument("--seconds", type=float, default=float("inf"), help=text)
    parser.add_argument(
        "--lanes", type=int, default=2, help="mutants that run side by side, each in a copy of its own (default 2)"
    )
    options = parser.parse_args()
    only = set(options.only.split(",")) if options.only else None
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    tree.begin(options.lanes)
    lanes = tree.lanes(options.lanes)
    for step in options.steps or STEPS:
        if step == "record":
            reach.record(False, options.tests.split(), options.lanes)
        elif step == "draw":
            _draw()
        elif step == "quick":
            _run("quick", only, options.again, options.seconds, lanes)
        elif step == "exhaustive":
            survivors = _survivors(only)
            if survivors:
                reach.record(True, options.tests.split(), options.lanes)
                with session("exhaustive") as into:
                    known = {item.job_id for item in into.work_items}
                    into.add_work_items([item for item in survivors if item.job_id not in known])
                _run("exhaustive", {item.job_id for item in survivors}, options.again, options.seconds, lanes)
        elif step == "confirm":
            _confirm()
        else:
            found = report.text()
            (tree.BUILD / "report.md").write_text(found)
            print(found)
    return 0


def _draw() -> None:
    with session("quick") as into:
        if not into.num_work_items:
            into.add_work_items(draw())


def _survivors(only: set[str] | None) -> list[WorkItem]:
    with session("quick") as quick:
        return [
            item
            for item, result in quick.completed_work_items
            if result.test_outcome is TestOutcome.SURVIVED and (only is None or item.job_id in only)
        ]


def _run(name: str, only: set[str] | None, again: bool, seconds: float, lanes: list[Path]) -> None:
    doubtful = unreliable()
    known = {n: t for n, t in reach.tests().items() if t.exhaustive == (name == "exhaustive") and n not in doubtful}
    with session(name) as db, ThreadPoolExecutor(len(lanes)) as pool:
        results = dict(db.results)
        waiting = [
            item
            for item in sorted(db.work_items, key=lambda item: item.job_id)
            if (only is None or item.job_id in only) and _is_open(results.get(item.job_id), doubtful, again)
        ]
        free, running = list(lanes), dict[Future[WorkResult], _Attempt]()

        def end_one() -> None:
            try:
                done, _ = wait(running, return_when=FIRST_COMPLETED)
            except KeyboardInterrupt:
                os._exit(130)  # the tests see that this process is gone, and end
            for future in done:
                attempt = running.pop(future)
                free.append(attempt.lane)
                verdict = attempt.verdict(db, future.result())
                where = f"{time.strftime('%H:%M')} {name} {attempt.number}/{len(waiting)}"
                print(f"{where} {report.line(attempt.item, verdict)}", file=sys.stderr, flush=True)

        for number, item in enumerate(waiting, 1):
            if not free:
                end_one()
            attempt = _attempt(item, number, free.pop(0), known, seconds)
            running[pool.submit(attempt.run)] = attempt
        while running:
            end_one()


def _is_open(result: WorkResult | None, doubtful: set[str], again: bool) -> bool:
    if result is None:
        return True
    if result.test_outcome is TestOutcome.SURVIVED:
        return again
    return verdict_of(result).test in doubtful


@dataclass
class _Attempt:
    """A mutant, the copy in which it runs, and the tests that it meets there."""

    item: WorkItem
    number: int
    lane: Path
    before: int  # tests that it has survived in earlier runs
    left: list[reach.Test]
    now: list[reach.Test]  # those of `left` that the time allows

    @property
    def passed(self) -> Path:
        return _passed_file(self.item)

    def run(self) -> WorkResult:
        """Run the tests with the mutant. Called in a thread of its own."""
        if not self.now:
            text = "" if self.before else "no test reaches it"
            output = json.dumps(asdict(Verdict("survived", text=text, ran=self.before)))
            return WorkResult(WorkerOutcome.NORMAL, output, TestOutcome.SURVIVED, report.diff_of(self.item))
        (spec,) = self.item.mutations
        spec = attrs.evolve(spec, module_path=self.lane / spec.module_path.relative_to(tree.TREE))
        plan = tree.BUILD / f"plan-{self.item.job_id}.json"
        plan.write_text(json.dumps({test.name: test.seconds for test in self.now}))
        judging = [sys.executable, "-m", "tools.mutants.judge", str(plan), str(self.passed)]
        try:
            # The runner has limits of its own, for each test.
            return mutate_and_test([spec], shlex.join(["env", f"MUTANTS_TREE={self.lane}", *judging]), timeout=100_000)
        finally:
            plan.unlink()

    def verdict(self, db: WorkDB, result: WorkResult) -> Verdict:
        """Return what became of the mutant, and keep it in the session where that is decided."""
        verdict = verdict_of(result)
        if verdict.how == "survived" and len(self.now) < len(self.left):
            verdict.how, verdict.text = "open", f"open: {len(self.left) - len(self.now)} tests are left"
        elif verdict.how != "error":
            db.set_result(self.item.job_id, result)
        return verdict


def _attempt(item: WorkItem, number: int, lane: Path, known: dict[str, reach.Test], seconds: float) -> _Attempt:
    (spec,) = item.mutations
    chosen = reach.reaching(spec.module_path, lines(spec), function(spec), known, killers())
    # What an interrupted run has done, and what has not changed since the mutant survived, counts.
    before = _passed(_passed_file(item))
    left = [test for test in chosen if test.name not in before]
    return _Attempt(item, number, lane, len(before), left, _within(left, seconds))


def _within(tests: list[reach.Test], seconds: float) -> list[reach.Test]:
    """Return as many tests as take `seconds`, at least one if there are any."""
    ends = list(accumulate(test.seconds for test in tests))
    return tests[: max(1, bisect_right(ends, seconds))]


def _passed_file(item: WorkItem) -> Path:
    folder = tree.BUILD / "passed"
    folder.mkdir(exist_ok=True)
    return folder / f"{item.job_id}.jsonl"


def _passed(file: Path) -> set[str]:
    """Return the tests that passed with a mutant, unless their file has changed since."""
    if not file.exists():
        return set()
    return {line["test"] for line in read(file) if line["version"] == tree.version(line["test"])}


def _confirm() -> None:
    """Run the tests that killed a mutant without any mutant."""
    found = killers()
    known = reach.tests()
    wanted = {name: known[name].seconds for name in found if name in known}
    confirmed = set(json.loads(_confirmed().read_text())) if _confirmed().exists() else set()
    left = {name: seconds for name, seconds in wanted.items() if name not in confirmed}
    if left:
        verdict, failed = judge(left)
        if verdict.how in ("error", "hung", "broken"):
            raise SystemExit(f"the tests that killed mutants do not run without one: {verdict}")
        (tree.BUILD / "unreliable.json").write_text(json.dumps(sorted(unreliable() | set(failed))))
        _confirmed().write_text(json.dumps(sorted(confirmed | (left.keys() - set(failed)))))
        if failed:
            print(
                f"fail without any mutant, too, and are left out from now on (run quick and exhaustive again): {failed}"
            )


def _confirmed() -> Path:
    return tree.BUILD / "confirmed.json"


if __name__ == "__main__":
    sys.exit(main())
