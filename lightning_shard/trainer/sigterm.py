"""SIGTERM, to which all ranks answer after the same step, whichever of them has got it.

Lightning's handler waits for rank 0 in the middle of whatever the rank was doing. With a sharded model that is a deadlock as
soon as rank 0 waits for this rank, as it does in each forward; and a rank to which nobody has sent the signal (say, one on
another machine than the one that is taken away) never comes. So here the handler only takes note; before each batch of training,
and where an evaluation begins, the ranks agree whether one of them has.
"""

from __future__ import annotations

from typing import Any

from torch_shard.frontend import anywhere
from torch_shard.log import logger

from .._private import (
    MixinBase,
    Private,
    restore_sigterm_handling,
    set_received_sigterm,
    shadow_sigterm_handling,
)

__all__ = ["SigtermMixin"]


class SigtermMixin(MixinBase):  # type: ignore[misc]
    """The part of a strategy that answers SIGTERM."""

    _private: Private
    _sigterm_of: Any = None  # the Trainer whose handler only takes note
    _sigterm_noted: bool = False  # by this rank

    def _defer_sigterm(self, trainer: Any) -> None:
        self._sigterm_of, self._sigterm_noted = trainer, False
        shadow_sigterm_handling(trainer, self._note_sigterm, self._end_if_told)

    def _restore_sigterm(self) -> None:
        trainer, self._sigterm_of = self._sigterm_of, None
        if trainer is not None:
            restore_sigterm_handling(trainer)

    def _note_sigterm(self, signum: int, frame: Any) -> None:
        """The handler."""
        trainer = self._sigterm_of
        if trainer is None or self._sigterm_noted:
            return
        self._sigterm_noted = True
        logger.info("SIGTERM: rank %d ends with the others", self.global_rank)
        if self.launcher is not None:
            self.launcher.kill(signum)  # to the ranks that this process has started
        if not trainer.training:  # evaluation ends after the batch, on each rank by itself
            set_received_sigterm(trainer)

    def _told_to_end(self) -> bool:
        """Whether any rank has got it. Collective."""
        engine = self.engine_or_none
        if engine is None:
            return False
        # Only what all have heard counts: the handler may run while this waits.
        told = anywhere(engine, "the start of a batch or loop", self._sigterm_noted)
        if told:
            self._sigterm_noted = True
            set_received_sigterm(self.lightning_module.trainer)
        return told

    def _end_if_told(self) -> None:
        """Before a batch of training. Collective."""
        if self._told_to_end():
            raise self._private.SIGTERMException
