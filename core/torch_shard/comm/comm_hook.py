"""The user's own reduction of gradients in place of the engine's: ``engine.register_comm_hook``.

Signatures and meaning are those of torch's FullyShardedDataParallel, so that its hooks
(``torch.distributed.algorithms._comm_hooks.default_hooks``) run unchanged.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..errors import ShardError
from .collectives import Collectives
from .consensus import agree
from .gradient_reduction import Reduction, cast
from .work import OnStream, Pending

if TYPE_CHECKING:
    from .ports import ModelPort


@dataclass(eq=False)
class CommHook:
    """A communication hook of the user, with its state."""

    state: Any
    function: Callable[..., Any]
    error: Exception | None = None  # the first error that the hook raised in this backward

    def start(
        self,
        collectives: Collectives,
        grad: torch.Tensor,
        dtype: torch.dtype,
        narrow: bool,
        streams: Sequence[Any],
    ) -> Reduction:
        """Call the hook with this rank's own gradients of a unit, and return the reduction.

        All of it has ended except for the all-reduce between replicas.

        Args:
            collectives: the collectives of the engine.
            grad: 1-D, not divided by the number of ranks. The hook may overwrite it.
            dtype, narrow: the arguments with which :meth:`.Reduction.finish` will be called.
            streams: on a device, the streams that wrote to `grad`.
        """
        c = collectives
        with torch.no_grad(), c.reducing():
            expected = (grad.numel() // c.size,)
            result = grad if c.size == 1 else torch.empty(expected, dtype=grad.dtype, device=grad.device)
            try:
                self.function(self.state, *((grad,) if c.size == 1 else (grad, result)))
                if result.shape != expected or result.device != c.device:
                    raise ShardError(
                        f"rank {c.world_rank}: the communication hook {hook_name(self.function)} left a gradient of shape "
                        f"{tuple(result.shape)} on {result.device}; it must fill the one of shape {expected} that it is given."
                    )
            except Exception as error:
                # The error is raised at the end of this backward, on all ranks: until then the other ranks go on, and call
                # their hooks for other units.
                self.error = self.error or error
                result = torch.zeros(expected, dtype=grad.dtype, device=grad.device)
            if c.replica_channel is None:
                result = cast(result, dtype, narrow)
                assert c.reduce_channel is not None
                channel, event = c.reduce_channel, c.reduced()
                work = None if event is None else OnStream(event)
                if work is not None:
                    # Hazard: where backward fails, nobody waits, and the memory must not be reused before the hook has run.
                    channel.groups.buffers[work] = grad, result
                pending = Pending(c.watchdog, channel, 0, hook_name(self.function), work, event, c.streams)
            else:
                # The mean of the replicas' means is the mean over all ranks, because all replicas have equally many ranks.
                result = result.to(grad.dtype) / c.topology.replicas
                pending = c.all_reduce_between_replicas(result, "the mean of the replicas' gradients")
            # The result is `total`, and not given back for reuse: the hook may have kept it.
            return Reduction(c, grad, result, pending, streams=streams, total=result)

    def raise_together(self, port: ModelPort, failed: bool) -> None:
        """Raise the error of this backward, on all ranks, if the hook `failed` on any rank. Collective if `failed`."""
        error, self.error = self.error, None
        if failed:
            agree(port, f"the communication hook {hook_name(self.function)}", None, error)


def hook_name(hook: Any) -> str:
    """Return the name of a communication hook, for error messages."""
    return str(getattr(hook, "__qualname__", type(hook).__qualname__))
