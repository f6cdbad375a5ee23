"""The interface that a unit needs of the runtime above it, which :class:`~torch_shard.runtime.runtime.Runtime` has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from ..comm.traffic_statistics import GatheredBytes
    from ..config.shard_config import ShardConfig
    from ..shard_tensor.tensor import ShardTensor
    from .flat_buffer import FlatBuffer
    from .unit import Unit

__all__ = ["OnDemandPort", "RuntimePort"]


class RuntimePort(Protocol):
    """The part of a runtime that its units use."""

    @property
    def config(self) -> ShardConfig: ...

    @property
    def gathered_bytes(self) -> GatheredBytes:
        """The counter of the memory of all units' unsharded parameters."""

    @property
    def in_forward(self) -> bool:
        """True if a forward of the model is running."""

    @property
    def on_demand(self) -> OnDemandPort:
        """What unshards parameters for single operations outside their modules' forward."""

    def add(self, unit: Unit) -> None:
        """Add `unit` to the runtime's units."""

    def note_issued(self, kind: str, unit: Unit) -> None:
        """Record that a collective of `unit` was issued, in the sequence that the ranks compare."""

    def on_grad(self, unit: Unit, flat: FlatBuffer, index: int, grad: torch.Tensor) -> None:
        """Take in the gradient of one unsharded parameter."""

    def check_grad_reader(self) -> None:
        """Raise if `.grad` is read that an optimizer's step in backward has consumed."""

    def leave_interrupted(self) -> None:
        """Do what the forward hooks would have done that an interrupt has skipped."""


class OnDemandPort(Protocol):
    """The part of :class:`~torch_shard.runtime.on_demand.OnDemand` that units use."""

    def begin(
        self, unit: Unit, param: ShardTensor, func: Any, local_ok: bool, dtypes: frozenset[torch.dtype]
    ) -> torch.Tensor | None:
        """Return what `func` computes with in place of `param`; None for the shards."""

    def done(self, unit: Unit, result: Any, copies: list[torch.Tensor], name: str) -> None:
        """End the operation for which :meth:`begin` was called."""

    def watch_copies(self, copies: list[torch.Tensor], name: str) -> None:
        """Make it an error to edit one of `copies`, which stand for views of `name`."""
