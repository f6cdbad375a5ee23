"""The callback that logs what sharding costs, for both namespaces: a mixin that the concrete classes put before Callback."""

from __future__ import annotations

import os
import time
from typing import Any

import torch

from torch_shard import Engine, Statistics
from torch_shard.errors import ConfigError
from torch_shard.frontend import Moment, check_report_path, format_bytes
from torch_shard.log import logger

from .._private import Private, accumulates, logged_step, logs_this_step
from .hints import hints
from .metrics import WAITS, Window


class MonitorMixin:
    """Logs what sharding costs: bytes sent, waiting for communication, memory, and norms of gradients.

    Each logger of the Trainer gets this rank's figures at the steps that ``log_every_n_steps`` chooses, as means over the steps
    since the last time. (A step is what Lightning counts as one, all its micro-batches included.)

    - ``shard/bytes_sent``: bytes sent for parameters and gradients;
    - ``shard/gather_wait``, ``shard/reduce_wait``: seconds for which training waited for parameters, or for sums of
      gradients; ``shard/other_wait``: for the other ranks; ``shard/host_wait``: for the host to step on offloaded parameters or
      to copy them;
    - ``shard/wait_share``: the first two of these, as a share of the step's time;
    - ``shard/gathered_bytes``, ``shard/peak_gathered_bytes``: gathered parameters held at the step's end, and at most since the
      last time; ``shard/resident_bytes``: this rank's parameters, gradients and optimizer state;
    - ``shard/grad_norm/<unit>`` with `grad_norms`.

    The slash is the logger's own separator. Without a logger the rest works all the same. At the end of an epoch the callback
    prints one line on the progress bar (without a bar, on standard output). Once in a run it warns if communication does not hide
    behind compute, and says what may help.

    On GPUs it is the streams that wait, and the figures of a step may be those of a step before: see ``Engine.time_waiting``.

    Args:
        grad_norms: log the 2-norm of each unit's gradients, before clipping, as a single device computes it. One small collective
            at each logged step and optimizer.
        threshold: the share of a step that may be spent waiting for gathers and reductions; 1 turns the warning off.
        warm_up: the first steps of the run, which don't count for the warning.
        patience: the number of steps in a row that must be above the threshold.
        summary: print the line at the end of each epoch.
        report: a file ending in ``.html`` to which rank 0 writes a page with pictures of the run when it ends, also where it
            ends with an error; see :meth:`torch_shard.Engine.report`. It has the steps that ``log_every_n_steps`` chooses.

    Raises:
        ConfigError: an argument has a bad value, or the report can't be written there.
        MisconfigurationException: on all ranks when the run begins, if the Trainer's strategy is another one.
    """

    _private: Private

    def __init__(
        self,
        grad_norms: bool = False,
        *,
        threshold: float = 0.3,
        warm_up: int = 10,
        patience: int = 20,
        summary: bool = True,
        report: str | os.PathLike[str] | None = None,
    ) -> None:
        if not 0 < threshold <= 1:
            raise ConfigError(f"threshold must be a share above 0 and at most 1, not {threshold!r}.")
        for name, value, least in (("warm_up", warm_up, 0), ("patience", patience, 1)):
            if not isinstance(value, int) or value < least:
                raise ConfigError(f"{name} must be a number of steps, at least {least}, not {value!r}.")
        if report is not None:
            check_report_path("report", os.fspath(report))
        super().__init__()
        self.report = report
        self.grad_norms, self.summary = grad_norms, summary
        self.threshold, self.warm_up, self.patience = threshold, warm_up, patience
        self._forget()

    def _forget(self) -> None:
        self._engine: Engine | None = None
        self._began: tuple[float, Statistics] | None = None
        self._step, self._logged, self._epoch = Window(), Window(), Window()
        self._norms: dict[int, dict[str, torch.Tensor]] = {}  # by optimizer
        self._history: list[Moment] = []
        self._seen = self._above = 0
        self._warned = False

    # -- hooks, in the order of the Trainer's calls -------------------------------------------------------------------
    def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Refuse strategies that have no engine."""
        if not hasattr(trainer.strategy, "engine_or_none"):
            raise self._private.MisconfigurationException(
                f"{type(self).__name__} shows what the strategy 'shard' and its variants do, and this Trainer has "
                f"{type(trainer.strategy).__name__}. Set Trainer(strategy='shard') or leave the callback out."
            )

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        """Start to count."""
        self._forget()
        self._engine = trainer.strategy.engine
        self._engine.time_waiting()
        self._engine.reset_peak_gathered()

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        """Note the figures at the start of a micro-batch."""
        if self._engine is not None:
            self._began = time.perf_counter(), self._engine.statistics()

    def on_before_optimizer_step(self, trainer: Any, pl_module: Any, optimizer: Any) -> None:
        """Take the norms of gradients before they are clipped. Collective at steps that are logged."""
        # Whether a logger is there, or a stop was asked for, may differ between the ranks; this does not.
        if self.grad_norms and self._engine is not None and logs_this_step(trainer):
            parameters = [p for group in optimizer.param_groups for p in group["params"]]
            number = next((i for i, o in enumerate(trainer.optimizers) if o is optimizer), -1)
            norms = self._engine.grad_norms(parameters=parameters)
            mine = {id(p) for p in parameters}
            units = {unit.name for unit in self._engine.units if not mine.isdisjoint(map(id, unit.params))}
            self._norms[number] = {name: norm for name, norm in norms.items() if name in units}

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        """Count a micro-batch, and log if it ends a step."""
        if self._engine is None or self._began is None:
            return
        begun, before = self._began
        self._began = None
        self._step.add(time.perf_counter() - begun, self._engine.statistics().since(before))
        if accumulates(trainer):
            return
        step, self._step = self._step, Window()
        step.steps = 1
        self._logged.join(step)
        self._epoch.join(step)
        self._watch(trainer, step)
        if logs_this_step(trainer) or trainer.should_stop:
            self._log(trainer, self._logged)
            self._norms.clear()
            self._logged = Window()
            self._engine.reset_peak_gathered()

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        """Print the line on the progress bar."""
        epoch, self._epoch = self._epoch, Window()
        if self._engine is None or not epoch.steps or not self.summary or not trainer.is_global_zero:
            return
        held = self._engine.memory_summary(trainer.optimizers)
        resident = format_bytes(held["parameters"] + held["gradients"] + held["optimizer"])
        peak = format_bytes(epoch.peak_gathered)
        share = 1 / max(epoch.seconds, 1e-9)
        pl_module.print(  # goes through the progress bar, whichever it is, and to standard output where there is none
            f"shard: epoch {trainer.current_epoch}: {format_bytes(epoch.bytes_sent // epoch.steps)} sent per step; waited "
            f"{epoch.gather_wait * share:.1%} of the time for gathers, {epoch.reduce_wait * share:.1%} for reductions, "
            f"{epoch.other_wait * share:.1%} for other ranks; {resident} resident, {peak} gathered "
            "at most"
        )

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        """Write the report."""
        self._write_report(trainer)

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        """Write the report of the run so far."""
        self._write_report(trainer)

    def _write_report(self, trainer: Any) -> None:
        if self.report is not None and self._engine is not None and trainer.is_global_zero:
            try:
                self._engine.report(self.report, trainer.optimizers, self._history)
            except Exception:  # the training is worth more, and its own error, too
                logger.exception("the report could not be written to %s", self.report)

    def teardown(self, trainer: Any, pl_module: Any, stage: str) -> None:
        """Drop the engine."""
        if self._engine is not None:
            self._engine.time_waiting(False)
        self._forget()

    # -- figures ------------------------------------------------------------------------------------------------------
    def _log(self, trainer: Any, window: Window) -> None:
        reports = self.report is not None and trainer.is_global_zero
        if not trainer.loggers and not reports:
            return
        assert self._engine is not None
        held = self._engine.memory_summary(trainer.optimizers)
        resident = held["parameters"] + held["gradients"] + held["optimizer"]
        waits = {name: getattr(window, name) / window.steps for name in WAITS}
        if reports:
            seconds, step = window.seconds / window.steps, logged_step(trainer)
            self._history.append(Moment(step, seconds, **waits, resident=resident, peak_gathered=window.peak_gathered))
        figures = {
            "bytes_sent": window.bytes_sent / window.steps,
            **waits,
            "wait_share": window.share,
            "gathered_bytes": float(held["gathered"]),
            "peak_gathered_bytes": float(window.peak_gathered),
            "resident_bytes": float(resident),
        }
        norms = _joined(list(self._norms.values()))
        for each in trainer.loggers:
            between = each.group_separator
            metrics = {f"shard{between}{name}": value for name, value in figures.items()}
            metrics |= {f"shard{between}grad_norm{between}{unit}": norm for unit, norm in norms.items()}
            each.log_metrics(metrics, step=logged_step(trainer))

    def _watch(self, trainer: Any, step: Window) -> None:
        """Warn once if `patience` steps in a row are above the threshold."""
        self._seen += 1
        if self._warned or self.threshold >= 1 or self._seen <= self.warm_up:
            return
        self._above = self._above + 1 if step.share > self.threshold else 0
        if self._above < self.patience:
            return
        self._warned = True
        assert self._engine is not None
        share = 1 / max(step.seconds, 1e-9)
        logger.warning(
            "communication does not hide behind compute: in %d steps in a row training waited for more than %.0f%% of the time; "
            "in the last one %.0f%% for gathered parameters and %.0f%% for reduced gradients. What may help: %s.",
            self.patience,
            100 * self.threshold,
            100 * step.gather_wait * share,
            100 * step.reduce_wait * share,
            "; ".join(hints(self._engine, step, trainer)),
        )


def _joined(norms: list[dict[str, torch.Tensor]]) -> dict[str, float]:
    """Return one norm for each unit, over all optimizers that hold parameters of it. Waits for the device once."""
    names = list(dict.fromkeys(name for some in norms for name in some))
    if not names:
        return {}
    stacked = [torch.stack([some[name] for some in norms if name in some]).norm() for name in names]
    return dict(zip(names, torch.stack(stacked).tolist(), strict=True))
