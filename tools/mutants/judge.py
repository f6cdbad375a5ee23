"""Runs tests in the copy until one fails or hangs: what Cosmic Ray runs for each mutant.

``python -m tools.mutants.judge PLAN PASSED``: PLAN is a file with the tests and the seconds that each took, and to PASSED those
are appended that pass. The verdict is printed as JSON, and the exit status is 1 where the mutant is killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path

from tools.mutants import settings, tree
from tools.mutants.record import read

# What a test says that something took too long for, rather than went wrong.
_TOO_SLOW = re.compile(r"did not end within|TimeoutExpired|TimeoutError|timed? ?out", re.IGNORECASE)


@dataclass
class Verdict:
    """What became of a mutant: `how` is survived, failed, hung, broken (nothing can be imported) or error (no verdict)."""

    how: str
    test: str = ""
    text: str = ""
    ran: int = 0  # tests
    seconds: float = 0.0

    @property
    def killed(self) -> bool:
        return self.how in ("failed", "hung", "broken")


def judge(tests: dict[str, float], passed: Path | None = None) -> tuple[Verdict, list[str]]:
    """Run `tests`, seconds by name, in order; with `passed`, until one fails. Return the verdict, and all that failed."""
    began, left, ran, batch = time.monotonic(), dict(tests), 0, settings.BATCH
    while True:
        # A few at first, whose files are soon collected: most mutants live no longer.
        now = dict(islice(left.items(), batch)) if passed else left
        verdict, failed = _run(now, passed)
        ran += verdict.ran
        if verdict.how == "survived" and len(now) < len(left):
            left = dict(islice(left.items(), batch, None))
            batch *= 8
            continue
        if verdict.test and verdict.killed and (verdict.how == "hung" or _TOO_SLOW.search(verdict.text)):
            # Slow or stuck? What is stuck is so once more.
            again, _ = _run({verdict.test: left[verdict.test]}, passed)
            if again.killed:
                verdict.how = "hung" if "did not end within" in verdict.text else verdict.how
            else:
                names = list(left)
                left = {name: left[name] for name in names[names.index(verdict.test) + 1 :]}
                if left:
                    continue
                verdict = Verdict("survived")
        verdict.ran, verdict.seconds = ran, round(time.monotonic() - began, 1)
        return verdict, failed


def _run(tests: dict[str, float], passed: Path | None) -> tuple[Verdict, list[str]]:
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        listed, progress, output = Path(folder, "tests"), Path(folder, "progress"), Path(folder, "output")
        listed.write_text(json.dumps(list(tests)))
        files = dict.fromkeys(name.partition("::")[0] for name in tests)
        command = tree.pytest("-m", "", "-p", "tools.mutants.chosen", *(["-x"] if passed else []), *files)
        environment = tree.environment(MUTANTS_TESTS=listed, MUTANTS_PROGRESS=progress, PYTHONDONTWRITEBYTECODE=1)
        with output.open("wb") as out:
            running = subprocess.Popen(
                command,
                cwd=tree.TREE,
                env=environment,
                stdout=out,
                stderr=out,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
            try:
                hung = _watch(running, progress, tests)
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(running.pid, signal.SIGKILL)
                running.wait()
        events = read(progress)
        ran = sum(event["event"] == "ended" for event in events)
        failures = {event["test"]: event["text"] for event in reversed(events) if event["event"] == "failed"}
        failed = list(failures)[::-1]
        if passed is not None:
            with passed.open("a") as out:
                for test in (e["test"] for e in events if e["event"] == "ended" and e["test"] not in failures):
                    out.write(json.dumps({"test": test, "version": tree.version(test)}) + "\n")
        if hung is not None:
            return Verdict("hung", hung, "", ran), failed
        if failed and failed[0] in tests:
            return Verdict("failed", failed[0], failures[failed[0]], ran), failed
        if failed or (running.returncode and not events):
            text = failures[failed[0]] if failed else output.read_text(errors="replace")[-3000:]
            return Verdict("broken", "", text, ran), failed
        if running.returncode == 0 and ran == len(tests):
            return Verdict("survived", ran=ran), []
        if running.returncode < 0 or running.returncode > 5:  # the test process itself died
            began = [event["test"] for event in events if event["event"] == "began"]
            return Verdict("failed", began[-1] if began else "", f"exit status {running.returncode}", ran), failed
        text = f"exit status {running.returncode}, {ran} of {len(tests)} tests\n{output.read_text(errors='replace')[-3000:]}"
        return Verdict("error", text=text, ran=ran), failed


def _watch(running: subprocess.Popen[bytes], progress: Path, tests: dict[str, float]) -> str | None:
    """Wait for pytest; return the test that hangs, "" for the beginning, or None."""
    parent, at, since, limit = os.getppid(), "", time.monotonic(), settings.START
    size = 0
    while running.poll() is None:
        if os.getppid() != parent:
            raise SystemExit("whoever wanted this is gone")
        now = progress.stat().st_size if progress.exists() else 0
        if now != size:
            size, since = now, time.monotonic()
            events = read(progress)
            at = events[-1]["test"] if events else ""
            limit = max(settings.AT_LEAST, settings.SLOWER * tests.get(at, 0.0)) if at else settings.START
        elif time.monotonic() - since > limit:
            return at
        time.sleep(0.1)
    return None


def main() -> int:
    verdict, _ = judge(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
    print(json.dumps(asdict(verdict)))
    return int(verdict.killed)


if __name__ == "__main__":
    sys.exit(main())
