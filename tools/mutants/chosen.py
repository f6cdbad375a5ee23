"""pytest plugin: runs the tests that ``MUTANTS_TESTS`` lists, in that order.

What begins, ends and fails is noted in ``MUTANTS_PROGRESS``.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest


def _note(event: str, test: str = "", text: str = "") -> None:
    with open(os.environ["MUTANTS_PROGRESS"], "a") as out:
        out.write(json.dumps({"event": event, "test": test, "text": text}) + "\n")


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    order = {test: number for number, test in enumerate(json.loads(Path(os.environ["MUTANTS_TESTS"]).read_text()))}
    config.hook.pytest_deselected(items=[item for item in items if item.nodeid not in order])
    items[:] = sorted((item for item in items if item.nodeid in order), key=lambda item: order[item.nodeid])
    _note("collected", text=str(len(items)))


def pytest_runtest_logstart(nodeid: str) -> None:
    _note("began", nodeid)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    if report.failed:
        _note("failed", report.nodeid, report.longreprtext[-20_000:])


def pytest_runtest_logfinish(nodeid: str) -> None:
    _note("ended", nodeid)


def pytest_collectreport(report: pytest.CollectReport) -> None:
    if report.failed:
        _note("failed", report.nodeid, report.longreprtext[-20_000:])
