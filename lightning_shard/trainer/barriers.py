"""Barriers, reductions and gathers of the Trainer, in which a rank would wait silently while another one is in a forward.

A ``validation_step`` that generates as many tokens as its batch needs does no harm under DDP, where a forward without gradients
sends nothing. Here one rank would wait in an all-gather, and the others in a reduction of the Trainer at the end of the loop.
Under DDP, too, a rank that alone logs with ``sync_dist=True`` within a step waits for ever. So the ranks first check that all
have come to the same operation.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from torch_shard.frontend import group_timeout, wait_for_all

from .._private import MixinBase


class BarrierMixin(MixinBase):  # type: ignore[misc]
    """The part of the Trainer's strategy that communicates for the user and the loops."""

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
        # This costs little, since Lightning's reduction begins with a barrier.
        self._wait_for_all("a reduction over the ranks (self.log with sync_dist=True, perhaps)", group)
        return super().reduce(tensor, group, reduce_op)

    def all_gather(self, tensor: Any, group: Any = None, sync_grads: bool = False) -> Any:
        """Return the tensors of all ranks, stacked. Collective.

        Raises:
            DivergenceError: at once on all ranks, if another rank waits in an operation of the engine.
        """
        self._wait_for_all("self.all_gather", group)
        return super().all_gather(tensor, group, sync_grads)

    def _wait_for_all(self, what: str, group: Any = None) -> None:
        engine = self.engine_or_none
        everyone = group in (None, dist.group.WORLD)  # a group of the user's own may lack some ranks
        if everyone and engine is not None and engine.world_size > 1 and not self._failed:
            wait_for_all(engine, group_timeout(self.root_device), what)
