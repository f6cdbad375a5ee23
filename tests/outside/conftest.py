"""All tests here are marked `outside`. They end with a table of the programs, and fail if too few of all programs ran."""

from __future__ import annotations

from pathlib import Path

import pytest

from .support.check import Outcome, check
from .support.program import Program
from .support.sources import ROOT, NotThere
from .support.summary import AT_LEAST, counts, ran, table

_HERE = Path(__file__).parent
_outcomes: list[Outcome] = []
_left_out: list[pytest.Item] = []


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


def pytest_deselected(items: list[pytest.Item]) -> None:
    _left_out.extend(item for item in items if _HERE in item.path.parents)


def _are_too_few(config: pytest.Config) -> bool:
    """Return True if all programs were to be started, and fewer than so many ran."""
    chosen = [Path(argument.partition("::")[0]).resolve() for argument in config.args]
    everything = not _left_out and any(path in (_HERE, *_HERE.parents) for path in chosen)
    return everything and bool(_outcomes) and ran(_outcomes) < AT_LEAST


def pytest_sessionfinish(session: pytest.Session) -> None:
    if _are_too_few(session.config) and session.exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    if not _outcomes:
        return
    terminalreporter.section("programs")
    for line in (*table(_outcomes), counts(_outcomes)):
        terminalreporter.write_line(line)
    if _are_too_few(config):
        terminalreporter.write_line(
            f"These are fewer than {AT_LEAST}, so this session fails: see which sources are missing."
        )
    target = ROOT / "build" / "outside.md"
    target.parent.mkdir(exist_ok=True)
    target.write_text("\n".join(table(_outcomes)) + "\n")
