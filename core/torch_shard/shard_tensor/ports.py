"""The interfaces that a sharded parameter needs of its unit and of the runtime.

:class:`~torch_shard.unit.unit.Unit`, :class:`~torch_shard.runtime.runtime.Runtime`,
:class:`~torch_shard.runtime.on_demand.OnDemand` and :class:`~torch_shard.runtime.optimizer_states.OptimizerStates` implement
them.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Protocol

import torch

if TYPE_CHECKING:
    from ..comm.collectives import Collectives
    from ..comm.one_sided.partners import ShardPart
    from ..comm.one_sided.versions import Versions
    from .function_call import FunctionCall
    from .tensor import ShardTensor


class UnitPort(Protocol):
    """The part of a unit that its parameters use."""

    exposed: bool  # the user was given the memory of a shard
    untraced: int  # the number of forwards in which the user may have changed values without a trace

    @property
    def collectives(self) -> Collectives: ...

    @property
    def host(self) -> Any:
        """The host memory in which the unit's shards are; None where they are on the device."""

    @property
    def casts(self) -> bool:
        """True if modules compute in another dtype than parameters are stored in."""

    @property
    def rounding(self) -> bool:
        """True if some of the unit's parameters are rounded stochastically."""

    @property
    def installed(self) -> bool:
        """True if modules hold the unsharded parameters at this moment."""

    @property
    def is_summoned(self) -> bool:
        """True inside ``engine.gathered``."""

    @property
    def runtime(self) -> RuntimePort:
        """The runtime that the unit belongs to."""

    def find(self, param: ShardTensor) -> tuple[Any, int]:
        """Return the flat buffer that holds `param`, and the parameter's index in it."""

    def unsharded_param_of(self, param: ShardTensor) -> torch.Tensor:
        """Return the unsharded parameter."""

    def differentiable(self, param: ShardTensor) -> torch.Tensor:
        """Return the tensor through which autograd reaches the parameter in a graph."""

    def register_grad_hook(self, param: ShardTensor, fn: Any) -> Any:
        """Register `fn` on this rank's full gradient."""

    def register_post_accumulate_hook(self, param: ShardTensor, fn: Any) -> Any:
        """Register `fn` to be called with `param` once its gradient is reduced."""

    def deepcopy_param(self, param: ShardTensor, memo: dict[int, Any]) -> Any:
        """Copy the unit and return the copy of `param`."""


class RuntimePort(Protocol):
    """The part of a runtime that sharded parameters use."""

    @property
    def in_forward(self) -> bool:
        """True if a forward of the model is running."""

    @property
    def on_demand(self) -> OnDemandPort:
        """The object that unshards parameters for single operations outside their modules' forward."""

    @property
    def optimizer_states(self) -> OptimizerStatesPort:
        """The object that reads optimizer state from the other ranks."""

    @property
    def versions(self) -> Versions:
        """The version of the shards."""

    @property
    def awaits_votes(self) -> bool:
        """True if :meth:`await_votes` has to be called before a gradient is read or changed."""

    def await_votes(self) -> None:
        """Learn which gradients the other ranks have."""

    def check_grad_reader(self) -> None:
        """Raise if `.grad` is read that an optimizer's step in backward has consumed."""

    def leave_interrupted(self) -> None:
        """Do what is left to do of a forward whose last hooks an interrupt has skipped."""


class OnDemandPort(Protocol):
    """The part of a runtime's ``on_demand`` that sharded parameters use."""

    def begin(
        self,
        unit: Any,
        param: ShardTensor,
        call: FunctionCall,
        local_ok: bool,
        dtypes: frozenset[torch.dtype],
    ) -> torch.Tensor | None:
        """Return what the function of `call` computes with in place of `param`; None for the shards.

        `local_ok`: the function gives the right result on shards, too. `dtypes`: the dtypes of the operands that are not sharded;
        empty unless the unit :attr:`casts <UnitPort.casts>`.
        """

    def alone(
        self, unit: Any, what: str, recipe: int, recording: bool, known: bool
    ) -> contextlib.AbstractContextManager[Callable[[ShardTensor], torch.Tensor] | None]:
        """Return a context with a function that reads a full parameter on this rank alone; with None where all ranks read.

        `recipe`: see :attr:`.FunctionCall.recipe`. `known`: the result can be computed from parameters; otherwise all ranks must
        read together.
        """

    def alone_for_file(
        self, what: str
    ) -> contextlib.AbstractContextManager[Callable[[ShardTensor], torch.Tensor] | None]:
        """Return a context with a function that reads a full parameter for a file of this rank; with None where it can't."""

    def end(self, unit: Any, result: Any, copies: list[torch.Tensor], name: str) -> None:
        """End the operation for which :meth:`begin` was called."""

    def watch_copies(self, copies: list[torch.Tensor], name: str) -> None:
        """Make it an error to edit one of `copies`, which stand for views of `name`."""


class OptimizerStatesPort(Protocol):
    """The part of a runtime's ``optimizer_states`` that sharded optimizer state uses."""

    def read(self, part: ShardPart, own: ShardTensor) -> torch.Tensor | None:
        """Return the full state `part`, of which this rank has the shard `own`; None where this rank can't read alone."""
