"""All tests here are marked `outside`. They end with a table of the programs."""

from __future__ import annotations

from pathlib import Path

import pytest

from .support.check import Outcome, check
from .support.program import Program
from .support.sources import ROOT, NotThere

_HERE = Path(__file__).parent
_outcomes: list[Outcome] = []


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.outside)


class Checker:
    """What the fixture ``outside`` gives: it runs programs and keeps what came out for the table."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def check(self, program: Program) -> None:
        """Run a program under DDP and under this package, and compare.

        Raises:
            AssertionError: it differs, or failed; the text says where.
        """
        outcome = Outcome(program)
        _outcomes.append(outcome)
        try:
            check(outcome, self._folder)
        except NotThere as reason:
            outcome.result, outcome.detail = "skipped", str(reason)
            pytest.skip(str(reason))


@pytest.fixture
def outside(tmp_path: Path) -> Checker:
    """Runs a program of a table: ``outside.check(program)``."""
    return Checker(tmp_path)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if not _outcomes:
        return
    lines = ["| program | switch | ranks | result | |", "|---|---|---|---|---|", *(o.row() for o in _outcomes)]
    terminalreporter.section("programs")
    for line in lines:
        terminalreporter.write_line(line)
    ran = [o for o in _outcomes if o.result in ("equal", "refused") and not o.program.is_library]
    equal = sum(o.result == "equal" for o in ran)
    terminalreporter.write_line(f"{len(ran)} outside programs ran, {equal} with equal numbers")
    target = ROOT / "build" / "outside.md"
    target.parent.mkdir(exist_ok=True)
    target.write_text("\n".join(lines) + "\n")
