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
    """A function of the user's, and its state."""

    state: Any
    function: Callable[..., Any]
    error: Exception | None = None  # that it raised in this backward

    def start(
        self, collectives: Collectives, grad: torch.Tensor, dtype: torch.dtype, narrow: bool = False
    ) -> HookedReduction:
        """Call it with this rank's own gradients of a unit, 1-D, not divided. It may replace what it is given. `dtype`, `narrow`:
        what `finish` will be called with."""
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
                # Raised at the end of this backward, on all ranks: the others go on, and call their hooks for other units.
                self.error = self.error or error
                result = torch.zeros(expected, dtype=grad.dtype, device=grad.device)
            if c.across_channel is None:
                return HookedReduction(c, grad, cast(result, dtype, narrow), c.reduced())
            # The mean of the means; the copies are as large as each other.
            result = result.to(grad.dtype) / c.topology.replicas
            pending = c.all_reduce_across(result, "the mean of the copies' gradients")
            return HookedReduction(c, grad, result, c.reduced(), pending)

    def raise_together(self, member: Member, failed: bool) -> None:
        """Raise what it raised in this backward; with `failed` it did so on some rank. Collective then."""
        error, self.error = self.error, None
        if failed:
            agree(member, f"the communication hook {_name(self.function)}", None, error)


@dataclass(eq=False)
class HookedReduction:
    """Like :class:`~torch_shard.comm.collectives.Reduction`, of a hook that has returned."""

    collectives: Collectives
    # Hazard: its memory goes back to the stream of the backward, and must not be used there again before the hook's collective,
    # on another one, has read it.
    grad: torch.Tensor
    result: torch.Tensor
    event: Any  # CUDA: recorded behind the hook's work
    pending: Pending | None = None  # the all-reduce between copies

    def abandon(self, seconds: float) -> None:
        """A partner may never come: don't wait for long."""
        if self.pending is not None:
            self.pending.settle(seconds)

    def finish(self, dtype: torch.dtype, narrow: bool = False) -> torch.Tensor:
        """This rank's slice, in `dtype`; with `narrow` in its own, if that is narrower."""
        if self.event is not None:
            # Hazard: compute must not read the slice before the hook has written it.
            torch.cuda.current_stream(self.collectives.device).wait_event(self.event)
        if self.pending is not None:
            self.pending.wait()
        # What a hook was given is not used again: it may have kept it.
        return cast(self.result, dtype, narrow)


def _name(hook: Any) -> str:
    return str(getattr(hook, "__qualname__", type(hook).__qualname__))
