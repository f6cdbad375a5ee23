"""Collectives that the host waits for, outside training steps: set-up, full values, and messages between ranks.

Sources are ranks of the sharded model, 0 to ``Collectives.world`` - 1. Each function names the purpose whose process group it
uses: "control" for tensors on the CPU, "reduce" for tensors on the model's device.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from .collectives import Collectives
from .watchdog import blocking
from .work import Channel

__all__ = ["all_reduce_max", "broadcast_from", "broadcast_in", "scatter_from"]


def all_reduce_max(c: Collectives, tensor: torch.Tensor, what: str) -> None:
    """Replace a CPU tensor by the elements' maxima over all ranks. Collective; `what` names the operation in errors."""
    blocking(c.watch, "control", what, dist.all_reduce, tensor, op=dist.ReduceOp.MAX)


def broadcast_from(c: Collectives, source: int, tensor: torch.Tensor, what: str, purpose: str = "control") -> None:
    """Replace `tensor` on every rank by that of rank `source`. Collective."""
    blocking(c.watch, purpose, what, dist.broadcast, tensor, src=c.watch.ranks[source])


def broadcast_in(c: Collectives, channel: Channel, tensor: torch.Tensor, what: str) -> None:
    """Replace `tensor` on the ranks of `channel` by that of the lowest of them. Collective over them, and all are here."""
    source = c.watch.ranks[min(channel.members)]
    blocking(c.watch, channel.name, what, dist.broadcast, tensor, src=source, ordered=c.watch.polls)


def scatter_from(
    c: Collectives, source: int, into: torch.Tensor, parts: Sequence[torch.Tensor] | None, what: str
) -> None:
    """Receive in `into` this rank's tensor of `parts`, which rank `source` gives for all ranks, in their order. Collective."""
    given = None if parts is None else list(parts)
    blocking(c.watch, "reduce", what, dist.scatter, into, given, src=c.watch.ranks[source])
