"""Collectives of the Trainer, in which a rank would wait without a word while another is in a forward of its own.

``if trainer.is_global_zero: self(x)`` in a hook of an evaluation, or a ``validation_step`` that generates as many tokens as its
batch wants, are no trouble under DDP, where a forward without gradients sends nothing. Here one rank gathers then, and the
others have gone on to what the Trainer reduces at the end of the loop. So before that the ranks see whether all have come.
"""

from __future__ import annotations

from typing import Any

from torch_shard.frontend import group_timeout, meet

from .._private import MixinBase

__all__ = ["MeetingMixin"]


class MeetingMixin(MixinBase):  # type: ignore[misc]
    """The part of the Trainer's strategy that talks to the other ranks between steps."""

    _failed: bool

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks.

        Raises:
            DivergenceError: at once, on all ranks: another rank waits in an operation of the engine.
        """
        self._meet("trainer.strategy.barrier")
        super().barrier(name)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduce a tensor over the ranks; anything else is returned as it is. Collective.

        Raises:
            DivergenceError: at once, on all ranks: another rank waits in an operation of the engine.
        """
        # Lightning's reduction begins with a barrier, so that this one costs little; and it is none within steps.
        if group is None:
            self._meet("a reduction over the ranks (self.log with sync_dist=True, perhaps)")
        return super().reduce(tensor, group, reduce_op)

    def _meet(self, what: str) -> None:
        engine = self.engine_or_none
        if engine is not None and engine.world_size > 1 and not self._failed:
            meet(engine, group_timeout(self.root_device), what)
