"""The interface that checkpoints need of the engine above them, which :class:`torch_shard.Engine` has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from torch import nn

from ..config.shard_config import ShardConfig
from ..runtime.runtime import Runtime

if TYPE_CHECKING:
    from .sharded.async_save import PendingSave
    from .sharded.host_snapshot import SnapshotMemory


class EnginePort(Protocol):
    """The engine whose model is saved or loaded.

    Attributes:
        config: the settings of the engine.
    """

    config: ShardConfig
    _runtime: Runtime
    _pending: PendingSave | None
    _staging: SnapshotMemory | None

    @property
    def model(self) -> nn.Module:
        """The sharded module."""

    def finish_saving(self) -> None:
        """Wait until the last asynchronous save is durable, if there was one."""
