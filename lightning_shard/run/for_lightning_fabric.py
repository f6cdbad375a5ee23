"""The stand-in for other strategies in the namespace ``lightning_fabric``."""

from __future__ import annotations

from lightning_fabric.strategies.ddp import DDPStrategy

from ..fabric.for_lightning_fabric import ShardFabricStrategy as _Own
from .stand_in import FabricStandInMixin

__all__ = ["ShardFabricStrategy"]


class ShardFabricStrategy(FabricStandInMixin, _Own):  # type: ignore[misc]
    __doc__ = _Own.__doc__


# Also in a process that multiprocessing starts, which imports this module to unpickle the strategy.
DDPStrategy.register(ShardFabricStrategy)
