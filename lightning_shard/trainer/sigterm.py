"""SIGTERM, which all ranks answer after the same step, whichever of them has received it.

Lightning's handler waits for rank 0 in the middle of whatever the rank was doing. With a sharded model that is a deadlock if
rank 0 waits for this rank, as it does in each forward; and a rank on another node may not receive the signal, and never come to
the handler. So here the handler only notes the signal. Before each batch of training, and when an evaluation begins, the ranks
find out whether any of them has received the signal.

Lightning's exception for it is a SystemExit without a status, which would be 0: a job that was stopped would count as complete.
"""

from __future__ import annotations

import signal
from typing import Any

from torch_shard.frontend import any_rank
from torch_shard.log import logger

from .._private import (
    MixinBase,
    Private,
    restore_sigterm_handling,
    set_received_sigterm,
    shadow_sigterm_handling,
)


class SigtermMixin(MixinBase):  # type: ignore[misc]
    """The part of a strategy that answers SIGTERM."""

    _private: Private
    _sigterm_of: Any = None  # the Trainer whose handler is shadowed
    _sigterm_noted: bool = False  # this rank has received the signal

    def _defer_sigterm(self, trainer: Any) -> None:
        self._sigterm_of, self._sigterm_noted = trainer, False
        shadow_sigterm_handling(trainer, self._note_sigterm, self._end_if_asked)

    def _restore_sigterm(self) -> None:
        trainer, self._sigterm_of = self._sigterm_of, None
        if trainer is not None:
            restore_sigterm_handling(trainer)

    def _note_sigterm(self, signum: int, frame: Any) -> None:
        """Note the signal, and pass it on to the ranks that this process has started."""
        trainer = self._sigterm_of
        if trainer is None or self._sigterm_noted:
            return
        self._sigterm_noted = True
        logger.info("SIGTERM: rank %d ends with the others", self.global_rank)
        if self.launcher is not None:
            self.launcher.kill(signum)
        if not trainer.training:  # evaluation ends after the batch, on each rank by itself
            set_received_sigterm(trainer)

    def _should_end(self) -> bool:
        """Return True if any rank has received the signal. Collective."""
        engine = self.engine_or_none
        if engine is None:
            return False
        # The answer of all ranks counts: the handler may run while this one waits.
        ends = any_rank(engine, "the start of a batch or loop", self._sigterm_noted)
        if ends:
            self._sigterm_noted = True
            set_received_sigterm(self.lightning_module.trainer)
        return ends

    def _end_if_asked(self) -> None:
        """End the run before a batch of training if any rank has received the signal. Collective."""
        if self._should_end():
            raise self._private.SIGTERMException

    def _give_exit_status(self, exception: BaseException) -> None:
        """Make a process that SIGTERM ends exit with the status 143, which says so."""
        # Lightning's own launcher kills the main process, which may still be saving, once a process that it has started exits
        # with another status than 0.
        environment = self._private.LightningEnvironment
        by_lightning = isinstance(self.cluster_environment, environment) and self.local_rank > 0
        if isinstance(exception, self._private.SIGTERMException) and not by_lightning:
            exception.code = 128 + signal.SIGTERM
