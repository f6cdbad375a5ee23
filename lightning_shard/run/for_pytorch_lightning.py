"""The stand-in for other strategies in the namespace ``pytorch_lightning``."""

from __future__ import annotations

from pytorch_lightning.strategies import DDPStrategy

from ..for_pytorch_lightning import ShardStrategy as _Own
from .stand_in import TrainerStandInMixin

__all__ = ["ShardStrategy"]


class ShardStrategy(TrainerStandInMixin, _Own):
    __doc__ = _Own.__doc__


# Also in a process that multiprocessing starts, which imports this module to unpickle the strategy.
DDPStrategy.register(ShardStrategy)
