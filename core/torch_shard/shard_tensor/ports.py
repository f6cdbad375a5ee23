"""What this room needs of the unit that holds a sharded parameter; :class:`~torch_shard.unit.unit.Unit` is that."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from ..comm.collectives import Collectives
    from .tensor import ShardTensor

__all__ = ["UnitPort"]


class UnitPort(Protocol):
    """A unit as its parameters see it."""

    exposed: bool  # a parameter was asked for its memory

    @property
    def collectives(self) -> Collectives: ...

    @property
    def host(self) -> Any:
        """The host memory in which the unit's shards are; None where they are on the device."""

    @property
    def casts(self) -> bool:
        """Whether modules compute in another dtype than parameters are stored in."""

    @property
    def rounding(self) -> bool:
        """Whether some of the unit's parameters are rounded stochastically."""

    @property
    def installed(self) -> bool:
        """Whether modules hold the unsharded parameters at this moment."""

    @property
    def is_summoned(self) -> bool:
        """Whether the unit is inside ``engine.gathered``."""

    @property
    def in_forward(self) -> bool:
        """Whether a forward of the model is running."""

    def find(self, param: ShardTensor) -> tuple[Any, int]:
        """Return the flat buffer that holds `param`, and the parameter's index in it."""

    def leaf_of(self, param: ShardTensor) -> torch.Tensor:
        """Return the unsharded parameter."""

    def differentiable(self, param: ShardTensor) -> torch.Tensor:
        """Return the tensor through which autograd reaches the parameter in a graph."""

    def on_demand(
        self, param: ShardTensor, func: Any, local_ok: bool, dtypes: frozenset[torch.dtype] = frozenset()
    ) -> torch.Tensor | None:
        """Return what `func` computes with in place of `param`; None where the shards will do."""

    def on_demand_done(self, result: Any, copies: list[torch.Tensor], name: str) -> None:
        """End the operation that :meth:`on_demand` was asked for."""

    def watch_copies(self, copies: list[torch.Tensor], name: str) -> None:
        """Have an edit of one of `copies`, which stand for views of `name`, be an error."""

    def check_grad_reader(self) -> None:
        """Raise where `.grad` is read that an optimizer has consumed in backward already."""

    def leave_interrupted(self) -> None:
        """Do what the hooks of forwards that an interrupt has ended would have done."""

    def register_grad_hook(self, param: ShardTensor, fn: Any) -> Any:
        """Register `fn` on the full gradient of this rank."""

    def register_post_accumulate_hook(self, param: ShardTensor, fn: Any) -> Any:
        """Register `fn` to be called with `param` once its gradient is reduced."""

    def deepcopy_param(self, param: ShardTensor, memo: dict[int, Any]) -> Any:
        """Copy the unit and return the copy of `param`."""
