"""pytest plugin: records which lines of the engine each test reaches, in all of its processes, and how long it takes.

``-p tools.mutants.record``, with the folder in ``MUTANTS_RECORD``. Each process keeps a file of coverage's own form there,
in which a context is a test. tests.jsonl has one line for each test. Tests that are recorded already do not run again, unless
their file has changed.

What a fixture of a module or session reaches is recorded as a context of its own, which the line of each test names that
uses it: it is set up during one of them only.
"""

from __future__ import annotations

import atexit
import contextlib
import dataclasses
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import coverage
import pytest

from tools.mutants import settings, tree

_coverage: coverage.Coverage | None = None


def _started() -> coverage.Coverage:
    global _coverage
    if _coverage is None:
        _coverage = coverage.Coverage(
            data_file=os.path.join(os.environ["MUTANTS_RECORD"], "parts", "coverage"),
            data_suffix=True,  # one of its own for each process
            include=[os.path.join(os.environ["MUTANTS_TREE"], package, "*") for package in settings.PACKAGES],
            config_file=False,
            messages=False,
        )
        _coverage.set_option("run:disable_warnings", ["no-data-collected", "module-not-measured", "already-imported"])
    _coverage.start()
    return _coverage


@contextlib.contextmanager
def recorded(test: str) -> Iterator[None]:
    """Add what this process does inside the block to what `test` reaches."""
    found = _started()
    found.switch_context(test)
    try:
        yield
    finally:
        found.stop()
        found.save()


def record_rest(test: str) -> None:
    """The same for all that this process does from now on. For programs that a test starts."""
    _started().switch_context(test)
    leave = os._exit

    def save() -> None:
        with contextlib.suppress(Exception):
            assert _coverage is not None
            _coverage.stop()
            _coverage.save()

    def exit_now(status: int) -> None:
        save()
        leave(status)

    atexit.register(save)
    os._exit = exit_now  # type: ignore[assignment]


@dataclasses.dataclass(frozen=True)
class Within:
    """What a job runs in on each rank: `inner`, recorded for `test`."""

    test: str
    inner: Callable[[], AbstractContextManager[None]] | None

    @contextlib.contextmanager
    def __call__(self) -> Iterator[None]:
        os.environ["PYTEST_CURRENT_TEST"] = f"{self.test} (call)"
        with recorded(self.test), contextlib.nullcontext() if self.inner is None else self.inner():
            yield


class Recorder:
    """The plugin, in the test process."""

    def __init__(self, folder: Path) -> None:
        self.file = folder / "tests.jsonl"
        (folder / "parts").mkdir(parents=True, exist_ok=True)
        self.context = ""
        self.seconds = 0.0
        self.outcome = "passed"

    @pytest.hookimpl(trylast=True)
    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        known = {(line["test"], line["version"]) for line in read(self.file)}
        done = [item for item in items if (item.nodeid, tree.version(item.nodeid)) in known]
        config.hook.pytest_deselected(items=done)
        gone = set(map(id, done))
        items[:] = [item for item in items if id(item) not in gone]

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        self.context, self.outcome, began = item.nodeid, "passed", time.monotonic()
        with recorded(item.nodeid):
            result = yield
        line = {
            "test": item.nodeid,
            "version": tree.version(item.nodeid),
            "exhaustive": item.get_closest_marker("exhaustive") is not None,
            "outcome": self.outcome,
            "seconds": round(time.monotonic() - began, 3),
            "fixtures": [_name(f) for f in _shared(item)],
        }
        with self.file.open("a") as out:
            out.write(json.dumps(line) + "\n")
        return result

    @pytest.hookimpl(wrapper=True)
    def pytest_fixture_setup(self, fixturedef: Any) -> Iterator[Any]:
        if fixturedef.scope == "function" or _coverage is None or not self.context:
            return (yield)
        before, self.context = self.context, _name(fixturedef)
        _coverage.switch_context(self.context)
        try:
            return (yield)
        finally:
            self.context = before
            _coverage.switch_context(before)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.outcome = "failed"
        elif report.skipped and self.outcome == "passed":
            self.outcome = "skipped"


def _shared(item: Any) -> list[Any]:
    found = getattr(item, "_fixtureinfo", None)
    definitions = [d for ds in found.name2fixturedefs.values() for d in ds] if found is not None else []
    return [d for d in definitions if d.scope != "function" and d.baseid and not getattr(d, "_autouse", False)]


def _name(fixture: Any) -> str:
    return f"fixture {fixture.argname} of {fixture.baseid}"


def pytest_configure(config: pytest.Config) -> None:
    from tests.support import ranks

    recorder = Recorder(Path(os.environ["MUTANTS_RECORD"]))
    config.pluginmanager.register(recorder)
    plain = ranks._Pool.run

    def run(self: Any, job: Any, *args: Any) -> Any:
        return plain(self, dataclasses.replace(job, within=Within(recorder.context, job.within)), *args)

    ranks._Pool.run = run  # type: ignore[method-assign]
    ranks.PRELOAD_IF_USED += (__name__,)


def read(file: Path) -> list[dict[str, Any]]:
    """Return the lines of a file of JSON lines; the last one may have been cut short."""
    found = []
    if file.exists():
        for line in file.read_text().splitlines():
            with contextlib.suppress(json.JSONDecodeError):
                found.append(json.loads(line))
    return found
