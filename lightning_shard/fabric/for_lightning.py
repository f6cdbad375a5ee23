"""`ShardFabricStrategy` for the namespace ``lightning.fabric``."""

from __future__ import annotations

from lightning.fabric.strategies.parallel import ParallelStrategy

from .._private import fabric_private
from ..checkpoint.files import FileMixin
from .strategy import FabricStrategyMixin

__all__ = ["ShardFabricStrategy"]

_PRIVATE = fabric_private("lightning.fabric")


class _FileIO(FileMixin, _PRIVATE.TorchCheckpointIO):  # type: ignore[misc, name-defined]
    pass


class ShardFabricStrategy(FabricStrategyMixin, ParallelStrategy):  # type: ignore[misc]
    __doc__ = FabricStrategyMixin.__doc__

    _private = _PRIVATE
    _launchers = (_PRIVATE.SubprocessScriptLauncher, _PRIVATE.MultiProcessingLauncher)
    _file_io = _FileIO
