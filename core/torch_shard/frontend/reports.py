"""The option ``--report`` of the runners: a page about the training of a script that knows nothing of this package."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from ..comm.traffic_statistics import Statistics
from ..log import logger
from ..optim.engines_of_optimizer import runtimes_of
from ..plan.run_report import WAITS, Moment
from ..runtime import registry
from ..utils.html_page import check_path

__all__ = ["reporting"]

_MOMENTS = 200  # when there are so many, neighbours are joined in pairs


def reporting(path: str | os.PathLike[str]) -> contextlib.AbstractContextManager[None]:
    """Return a context, around a script, at whose end rank 0 writes a page about the first model that was trained in it.

    The page is that of :meth:`torch_shard.Engine.report`, with the course of the run. The model and its optimizers are kept until
    the end. The page is also written, of the steps so far, if the script ends with an error. After ``engine.close()`` it shows
    that nothing is held. Not collective.

    Args:
        path: a file whose name ends in ``.html``, which is replaced.

    Raises:
        ConfigError: rank 0 can't write to the path.
    """
    text = os.path.abspath(path)  # the script may change the working directory
    # The other ranks write nothing, and may be on machines without that folder.
    return _reporting(_Report(check_path("--report", text) if os.environ.get("RANK", "0") == "0" else Path(text)))


@contextlib.contextmanager
def _reporting(report: _Report) -> Iterator[None]:
    hook = register_optimizer_step_post_hook(report.has_stepped)
    try:
        yield
    finally:
        hook.remove()
        report.write()


class _Report:
    """The page about one run: the model that it is about, and the course of its training."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._engine: Any = None
        self._model: Any = None  # keeps the model alive, which the engine doesn't
        self._optimizers: list[torch.optim.Optimizer] = []  # the model's optimizers; steps of the first one are counted
        self._steps, self._every = 0, 1
        self._since: tuple[int, float, Statistics] | None = None
        self._history: list[Moment] = []

    def has_stepped(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        """Count a step of the optimizer that stepped first."""
        if all(optimizer is not each for each in self._optimizers):
            self._add(optimizer)
        if not self._optimizers or optimizer is not self._optimizers[0]:
            return
        self._steps += 1
        if self._since is not None and self._steps % self._every:
            return
        now, counted = time.perf_counter(), self._engine.statistics()
        if self._since is not None:  # else this is the first step, which began before anything was counted
            step, begun, before = self._since
            self._note(self._steps - step, now - begun, counted.since(before))
        self._since = self._steps, now, counted
        self._engine.reset_peak_gathered()

    def _add(self, optimizer: torch.optim.Optimizer) -> None:
        engines = [registry.engine_for_runtime(each) for each in runtimes_of(optimizer)]
        if self._engine is None and engines and engines[0] is not None:
            self._engine, self._model = engines[0], engines[0].model
            self._engine.time_waiting()
        if self._engine is not None and self._engine in engines:
            self._optimizers.append(optimizer)

    def _note(self, steps: int, seconds: float, counted: Statistics) -> None:
        held = self._engine.memory_summary(self._optimizers)
        resident = held["parameters"] + held["gradients"] + held["optimizer"]
        waits = {name: getattr(counted, name) / steps for name in WAITS}
        self._history.append(
            Moment(self._steps, seconds / steps, **waits, resident=resident, peak_gathered=counted.peak_gathered)
        )
        if len(self._history) == _MOMENTS:
            self._history = [_joined(*pair) for pair in zip(self._history[::2], self._history[1::2], strict=True)]
            self._every *= 2

    def write(self) -> None:
        """Write the page on rank 0."""
        if self._engine is None:
            logger.warning("no model was trained sharded, so that there is no report.")
            return
        if self._engine.rank != 0:
            return
        try:
            self._engine.report(self._path, self._optimizers, self._history)
        except Exception:  # the script's own error is worth more
            logger.exception("the report could not be written to %s", self._path)


def _joined(a: Moment, b: Moment) -> Moment:
    """Return the mean of two moments of about equally many steps."""
    waits = {name: (getattr(a, name) + getattr(b, name)) / 2 for name in WAITS}
    peak = max(a.peak_gathered, b.peak_gathered)
    return Moment(b.step, (a.seconds + b.seconds) / 2, **waits, resident=b.resident, peak_gathered=peak)
