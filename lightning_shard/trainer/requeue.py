"""SLURM's requeue signal, answered by all ranks at the same step.

Lightning saves a checkpoint within the signal's handler. With a sharded model that takes all ranks, but each gets the signal
at another place: one in a forward, the next one waiting for it, some perhaps not at all. So the handler only notes
the signal. Between two steps, and when the run ends, the ranks exchange whether one of them has got it, and then all save.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import torch.distributed as dist

from torch_shard.log import logger

from .._private import (
    MixinBase,
    call_requeue_handler,
    requeue_signal_of,
    restore_requeue_handler,
    shadow_requeue_handler,
)
from ..strategy.settings import StrategySettings


class RequeueMixin(MixinBase):  # type: ignore[misc]
    """The part of a strategy that answers the signal before which SLURM ends a job (``SLURMEnvironment(auto_requeue=True)``)."""

    _failed: bool
    _settings: StrategySettings
    _requeue_of: Any = None  # the Trainer whose handler is shadowed
    _requeue_asked: int | None = None  # the signal that this rank has received

    def _defer_requeue(self, trainer: Any) -> None:
        if self._requeue_of is None and requeue_signal_of(self.cluster_environment) is not None:
            self._requeue_of, self._requeue_asked = trainer, None
            shadow_requeue_handler(trainer, self._note_requeue)

    def _note_requeue(self, signum: int, frame: Any) -> None:
        self._requeue_asked = signum

    def _answer_requeue(self) -> None:
        """Save and requeue if any rank has received the signal; called between steps. Collective if SLURM may send it."""
        if self._requeue_of is None:
            return
        asked = torch.tensor(int(self._requeue_asked or 0), device=self.root_device)
        dist.all_reduce(asked, op=dist.ReduceOp.MAX)  # self.reduce() would add a barrier to every step
        signum = int(asked)
        if signum:
            self._requeue_asked = None
            logger.info("requeue: rank %d saves with the others", self.global_rank)
            # The handler requeues the job right after the save, which ends this job: the save must be complete by then.
            settings, self._settings = self._settings, dataclasses.replace(self._settings, async_save=False)
            try:
                call_requeue_handler(self._requeue_of, signum)
            finally:
                self._settings = settings

    def _end_requeue(self) -> None:
        """Answer a signal of the run's last step, unless the run failed, and give the Trainer its handler back.

        Collective if SLURM may send the signal.
        """
        try:
            if not self._failed:
                self._answer_requeue()
        finally:
            if self._requeue_of is not None:
                restore_requeue_handler(self._requeue_of)
                self._requeue_of = None

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Answer the signal before a batch."""
        self._answer_requeue()
        super().on_train_batch_start(batch, batch_idx)
