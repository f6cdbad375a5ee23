"""The stand-in for other strategies in the namespace ``lightning.pytorch``."""

from __future__ import annotations

from lightning.pytorch.strategies import DDPStrategy

from ..for_lightning import ShardStrategy as _Own
from .stand_in import TrainerStandInMixin

__all__ = ["ShardStrategy"]


class ShardStrategy(TrainerStandInMixin, _Own):
    __doc__ = _Own.__doc__


# Also in a process that multiprocessing starts, which imports this module to unpickle the strategy.
DDPStrategy.register(ShardStrategy)
