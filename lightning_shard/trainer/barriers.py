"""Barriers and reductions of the Trainer, in which a rank would wait silently while another one is in a forward of its own.

``if trainer.is_global_zero: self(x)`` in a hook of an evaluation, or a ``validation_step`` that generates as many tokens as its
batch needs, do no harm under DDP, where a forward without gradients sends nothing. Here one rank waits in an all-gather, and the
others in what the Trainer reduces at the end of the loop. So the ranks first check that all have come to the same operation.
"""

from __future__ import annotations

from typing import Any

from torch_shard.frontend import group_timeout, wait_for_all

from .._private import MixinBase

__all__ = ["BarrierMixin"]


class BarrierMixin(MixinBase):  # type: ignore[misc]
    """The part of the Trainer's strategy that communicates between steps."""

    _failed: bool

    def barrier(self, name: str | None = None) -> None:
        """Wait for all ranks.

        Raises:
            DivergenceError: at once on all ranks, if another rank waits in an operation of the engine.
        """
        self._wait_for_all("trainer.strategy.barrier")
        super().barrier(name)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Return a tensor reduced over the ranks, and anything else as it is. Collective.

        Raises:
            DivergenceError: at once on all ranks, if another rank waits in an operation of the engine.
        """
        # This costs little, since Lightning's reduction begins with a barrier. Within steps it does nothing.
        if group is None:
            self._wait_for_all("a reduction over the ranks (self.log with sync_dist=True, perhaps)")
        return super().reduce(tensor, group, reduce_op)

    def _wait_for_all(self, what: str) -> None:
        engine = self.engine_or_none
        if engine is not None and engine.world_size > 1 and not self._failed:
            wait_for_all(engine, group_timeout(self.root_device), what)
