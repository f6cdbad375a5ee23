"""Small blocking collectives for the user's own code: norms, ``full_tensor``, reductions of parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist

from .process_group_ops import all_gather_single
from .watchdog import Watchdog, blocking
from .work import Channel


class UnknownStep(Protocol):
    """The step of an optimizer class that the engine does not know, which steps on the sharded tensors themselves."""

    def runs(self) -> bool:
        """Return True while such a step runs."""

    def refuse(self, message: str) -> str:
        """Return `message`, the text of an error about an operation that shards can't do, and add whose operation it was."""


_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN} if dist.is_available() else {}


@dataclass(eq=False)
class ScalarComm:
    """The blocking collectives that the user's own code asks for (norms, `full_tensor`).

    They run in a process group of their own, so that they cannot pair with a parameter gather or a gradient reduction of
    another rank.

    Attributes:
        watchdog: the watchdog, which waits for the collectives.
        channel: the channel over the ranks of the communicator; None if this rank is alone in it, and nothing is sent.
        over_replicas: the communicator over all replicas; None if this one spans them.
        device: the device to which tensors are copied before they are sent (for shards in host memory); None for their own.
        unknown_step: the step that may be running.
        bytes_sent: bytes of tensors gathered for the user's code; small messages don't count.
        size, rank: the number of ranks, and the number of this rank among them.
        world_rank: the number of this rank among all ranks of the engine, for error messages.
    """

    watchdog: Watchdog
    channel: Channel | None = None
    over_replicas: ScalarComm | None = None
    device: torch.device | None = None
    unknown_step: UnknownStep | None = None
    bytes_sent: int = 0

    def __post_init__(self) -> None:
        self.world_rank = self.watchdog.rank
        members = (self.world_rank,) if self.channel is None else self.channel.members
        self.size, self.rank = len(members), members.index(self.world_rank)

    @property
    def data_parallel(self) -> ScalarComm:
        """The communicator over all ranks whose gradients are averaged, whichever ranks share a replica."""
        return self.over_replicas or self

    def all_reduce(self, tensor: torch.Tensor, op: str, what: str) -> torch.Tensor:
        """Reduce `tensor` in place with `op`, one of ``"sum"``, ``"max"``, ``"min"``, and return it. Collective."""
        if self.channel is None:
            return tensor
        sent = self._on_device(tensor)
        self._run(what, dist.all_reduce, sent, op=_OPS[op])
        return tensor if sent is tensor else tensor.copy_(sent)

    def all_gather(self, tensor: torch.Tensor, what: str) -> torch.Tensor:
        """Return the ranks' tensors stacked, shape ``[size, *tensor.shape]``. Collective."""
        if self.channel is None:
            return tensor.unsqueeze(0)
        sent = self._on_device(tensor).contiguous()
        out = sent.new_empty((self.size, *tensor.shape))
        self._run(what, all_gather_single, out.view(-1), sent.view(-1))
        return out.to(tensor.device)

    def broadcast(self, tensor: torch.Tensor, source: int, what: str) -> None:
        """Overwrite `tensor` with that of rank `source`, a number among the communicator's ranks. Collective."""
        if self.channel is None:
            return
        sent = self._on_device(tensor)
        self._run(what, dist.broadcast, sent, group_src=source)
        if sent is not tensor:
            tensor.copy_(sent)

    def _on_device(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.device is None else tensor.to(self.device)

    def _run(self, what: str, function: Any, *args: Any, **kwargs: Any) -> None:
        assert self.channel is not None
        self.watchdog.host_barrier(what)
        blocking(self.watchdog, self.channel.name, what, function, *args, ordered=self.watchdog.on_streams, **kwargs)
