"""`ShardStrategy` and `ShardMonitor` for the namespace ``lightning.pytorch``.

Classes at module level, importable by name: those made inside a function can't be pickled by launchers that spawn.
"""

from __future__ import annotations

from lightning.pytorch.callbacks import Callback
from lightning.pytorch.strategies import ParallelStrategy

from ._private import private
from .checkpoint.files import FileMixin
from .monitor.callback import MonitorMixin
from .trainer.launcher import LauncherMixin
from .trainer.strategy import TrainerStrategyMixin

__all__ = ["ShardMonitor", "ShardStrategy"]

_PRIVATE = private("lightning")


class _ScriptLauncher(LauncherMixin, _PRIVATE.SubprocessScriptLauncher):  # type: ignore[misc, name-defined]
    pass


class _MultiProcessingLauncher(LauncherMixin, _PRIVATE.MultiProcessingLauncher):  # type: ignore[misc, name-defined]
    pass


class _FileIO(FileMixin, _PRIVATE.TorchCheckpointIO):  # type: ignore[misc, name-defined]
    pass


class ShardStrategy(TrainerStrategyMixin, ParallelStrategy):  # type: ignore[misc]
    __doc__ = TrainerStrategyMixin.__doc__

    _private = _PRIVATE
    _launchers = (_ScriptLauncher, _MultiProcessingLauncher)
    _file_io = _FileIO


class ShardMonitor(MonitorMixin, Callback):  # type: ignore[misc]
    __doc__ = MonitorMixin.__doc__

    _private = _PRIVATE
