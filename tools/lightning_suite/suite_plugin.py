"""A plugin of pytest: runs the cases asked for, each in a process of its own, and writes down how each ended and which
strategies it made by name. Where Lightning itself chooses DDP, it chooses the strategy of the same name of another family.

A case is a test with one set of parameters, called ``path::function#number`` by its place among the function's sets:
that is the same when the strategies' names in the parameters, and with them pytest's own ids, are others.

A process of its own, forked where nothing has been computed yet, since torch cannot fork ranks once a backward has run,
and since a test that hangs has to be ended together with its ranks.

Read from the environment, since the processes that a test's launcher starts run the same command again:

- ``LIGHTNING_SUITE_CASES``: a file with the functions (``path::function``) or cases to run, one a line;
- ``LIGHTNING_SUITE_FAMILY``: ``"ddp"`` or ``"shard"``;
- ``LIGHTNING_SUITE_RESULTS``: the file that gets a JSON object for each case;
- ``LIGHTNING_SUITE_TIMEOUT``: seconds that a case may take.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import os
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from _pytest.runner import runtestprotocol
from rewrite import renamed

_asked: list[str] = []
"""Names of the strategies that the test which is running took from a registry."""


def pytest_configure() -> None:
    from lightning.fabric.connector import _Connector
    from lightning.fabric.strategies import STRATEGY_REGISTRY
    from lightning.pytorch.strategies import StrategyRegistry
    from lightning.pytorch.trainer.connectors.accelerator_connector import _AcceleratorConnector

    for registry in (StrategyRegistry, STRATEGY_REGISTRY):
        _record(registry)
    for connector in (_AcceleratorConnector, _Connector):
        _replace_default(connector, os.environ["LIGHTNING_SUITE_FAMILY"])


def _replace_default(connector: Any, family: str) -> None:
    choose = connector._choose_strategy

    def choose_of_family(self: Any) -> Any:
        found = choose(self)
        return renamed(str(found), family) or found

    connector._choose_strategy = choose_of_family


def _record(registry: Any) -> None:
    get = registry.get

    def recording(name: str, default: Any = None) -> Any:
        _asked.append(str(name))
        return get(name, default)

    registry.get = recording


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    wanted = set(Path(os.environ["LIGHTNING_SUITE_CASES"]).read_text().split())
    numbers: Counter[str] = Counter()
    kept, dropped = [], []
    for item in items:
        function = f"{item.nodeid.partition('::')[0]}::{getattr(item, 'originalname', item.name)}"
        case = f"{function}#{numbers[function]}"
        numbers[function] += 1
        item.user_properties.append(("case", case))
        (kept if wanted & {function, case} else dropped).append(item)
    items[:] = kept
    config.hook.pytest_deselected(items=dropped)


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> bool | None:
    if (
        int(os.environ.get("LOCAL_RANK", "0")) > 0
    ):  # a rank that the test's launcher started, in the test's process group
        return None
    item.ihook.pytest_runtest_logstart(nodeid=item.nodeid, location=item.location)
    ending = _run_apart(item)
    with open(os.environ["LIGHTNING_SUITE_RESULTS"], "a") as results:
        print(json.dumps(dict(item.user_properties) | {"id": item.nodeid} | ending), file=results)
    print(f"{ending['outcome']:8}{ending['seconds']:4.0f} s  {item.nodeid}", file=sys.__stderr__, flush=True)
    item.ihook.pytest_runtest_logfinish(nodeid=item.nodeid, location=item.location)
    return True


def _run_apart(item: pytest.Item) -> dict[str, Any]:
    """Run a test in a fork, at most for its time, and leave none of its processes."""
    start, limit = time.monotonic(), int(os.environ["LIGHTNING_SUITE_TIMEOUT"])
    with tempfile.TemporaryFile("w+") as answer, tempfile.TemporaryFile("w+") as stacks:
        process = os.fork()
        if process == 0:
            status = 1
            try:
                os.setsid()
                faulthandler.dump_traceback_later(limit, file=stacks)
                json.dump(_run(item), answer)
                answer.flush()
                status = 0
            except BaseException:
                traceback.print_exc(file=stacks)
                stacks.flush()
            finally:
                os._exit(status)
        while os.waitpid(process, os.WNOHANG) == (0, 0):
            if time.monotonic() > start + limit + 1:
                _kill_group(process)
                os.waitpid(process, 0)
                break
            time.sleep(0.02)
        _kill_group(process)
        answer.seek(0)
        stacks.seek(0)
        text = answer.read()
        lost = {"outcome": "failed", "asked": [], "reason": stacks.read() or "E its process ended"}
    return (json.loads(text) if text else lost) | {"seconds": time.monotonic() - start}


def _kill_group(process: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # no process of the test is left
        os.killpg(process, signal.SIGKILL)


def _run(item: pytest.Item) -> dict[str, Any]:
    outcome, reason = "passed", ""
    for report in runtestprotocol(item, log=False):
        if report.outcome != "passed" and outcome != "failed":
            outcome = "xfailed" if hasattr(report, "wasxfail") else report.outcome
            reason = str(report.longrepr[2] if isinstance(report.longrepr, tuple) else report.longrepr)
    return {"outcome": outcome, "asked": sorted(set(_asked)), "reason": reason}
