"""The interface that a unit needs of the runtime above it, which :class:`~torch_shard.runtime.runtime.Runtime` has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

import torch

from ..shard_tensor import ports

if TYPE_CHECKING:
    from ..comm.collectives import Collectives
    from ..comm.one_sided.partners import Reading
    from ..comm.traffic_statistics import GatheredBytes
    from ..config.shard_config import ShardConfig
    from ..offload.host import Host
    from .flat_buffer import FlatBuffer
    from .unit import Unit


class RuntimePort(ports.RuntimePort, Protocol):
    """The part of a runtime that its units use."""

    @property
    def config(self) -> ShardConfig: ...

    @property
    def gathered_bytes(self) -> GatheredBytes:
        """The counter of the memory of all units' unsharded parameters."""

    @property
    def collectives(self) -> Collectives: ...

    @property
    def host(self) -> Host | None:
        """The host memory that holds parameters; None where they are on the device."""

    @property
    def reading(self) -> Reading | None:
        """The running read of the model by this rank alone."""

    def add(self, unit: Unit) -> None:
        """Add `unit` to the runtime's units."""

    def note_issued(self, kind: str, unit: Unit) -> None:
        """Record that a collective of `unit` was issued, in the sequence that the ranks compare."""

    def on_grad(self, unit: Unit, flat: FlatBuffer, index: int, grad: torch.Tensor, unshared: bool = False) -> None:
        """Take in the gradient of one unsharded parameter. `unshared`: nobody else refers to it."""
