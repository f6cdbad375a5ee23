"""The user's own reduction of gradients in place of the engine's: ``engine.register_comm_hook``.

Signatures and meaning are those of torch's FullyShardedDataParallel, so that its hooks
(``torch.distributed.algorithms._comm_hooks.default_hooks``) run unchanged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..errors import ShardError
from .collectives import Collectives
from .consensus import agree
from .gradient_reduction import cast
from .work import Pending

if TYPE_CHECKING:
    from .ports import Member

__all__ = [
    "CommHook",
    "HookedReduction",
]


@dataclass(eq=False)
class CommHook:
    """A communication hook of the user, with its state."""

    state: Any
    function: Callable[..., Any]
    error: Exception | None = None  # the first error that the hook raised in this backward

    def start(
        self, collectives: Collectives, grad: torch.Tensor, dtype: torch.dtype, narrow: bool = False
    ) -> HookedReduction:
        """Call the hook with this rank's own gradients of a unit, and return the reduction.

        Args:
            collectives: the collectives of the engine.
            grad: 1-D, not divided by the number of ranks. The hook may overwrite it.
            dtype, narrow: the arguments with which `finish` will be called.
        """
        c = collectives
        with torch.no_grad(), c.reducing():
            expected = (grad.numel() // c.size,)
            result = grad if c.size == 1 else torch.empty(expected, dtype=grad.dtype, device=grad.device)
            try:
                self.function(self.state, *((grad,) if c.size == 1 else (grad, result)))
                if result.shape != expected or result.device != c.device:
                    raise ShardError(
                        f"rank {c.world_rank}: the communication hook {_name(self.function)} left a gradient of shape "
                        f"{tuple(result.shape)} on {result.device}; it must fill the one of shape {expected} that it is given."
                    )
            except Exception as error:
                # The error is raised at the end of this backward, on all ranks: until then the other ranks go on, and call
                # their hooks for other units.
                self.error = self.error or error
                result = torch.zeros(expected, dtype=grad.dtype, device=grad.device)
            if c.replica_channel is None:
                return HookedReduction(c, grad, cast(result, dtype, narrow), c.reduced())
            # The mean of the replicas' means is the mean over all ranks, because all replicas have equally many ranks.
            result = result.to(grad.dtype) / c.topology.replicas
            pending = c.all_reduce_across(result, "the mean of the copies' gradients")
            return HookedReduction(c, grad, result, c.reduced(), pending)

    def raise_together(self, member: Member, failed: bool) -> None:
        """Raise the error of this backward, on all ranks, if the hook `failed` on any rank. Collective if `failed`."""
        error, self.error = self.error, None
        if failed:
            agree(member, f"the communication hook {_name(self.function)}", None, error)


@dataclass(eq=False)
class HookedReduction:
    """The counterpart of :class:`~torch_shard.comm.gradient_reduction.Reduction` for a hook that has returned."""

    collectives: Collectives
    # Hazard: the memory of `grad` returns to the pool of the backward's stream. It must not be reused there before the hook's
    # collective, which runs on another stream, has read it.
    grad: torch.Tensor
    result: torch.Tensor
    event: Any  # CUDA: recorded after the hook's work
    pending: Pending | None = None  # the inter-replica all-reduce

    def abandon(self, seconds: float) -> None:
        """Drop the reduction after a failed backward. A partner may never come, so this waits for `seconds` at most."""
        if self.pending is not None:
            self.pending.settle(seconds)

    def finish(self, dtype: torch.dtype, narrow: bool = False) -> torch.Tensor:
        """Wait, and return this rank's shard in `dtype`. With `narrow`, keep the result's dtype if that is narrower."""
        if self.event is not None:
            # Hazard: compute must not read the shard before the hook has written it.
            torch.cuda.current_stream(self.collectives.device).wait_event(self.event)
        if self.pending is not None:
            self.pending.wait()
        # The hook's tensors are not given back for reuse: the hook may have kept them.
        return cast(self.result, dtype, narrow)


def _name(hook: Any) -> str:
    return str(getattr(hook, "__qualname__", type(hook).__qualname__))
