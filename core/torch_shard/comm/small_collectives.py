"""Small blocking collectives for the user's own code: norms, ``full_tensor``, reductions of parameters."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from .process_group_ops import all_gather_single
from .watchdog import Watch, blocking
from .work import Channel

__all__ = ["ScalarComm", "SingleComm", "UnknownStep"]


class UnknownStep(Protocol):
    """The step of an optimizer class that the engine does not know, which steps on the sharded tensors themselves."""

    def runs(self) -> bool:
        """Return True while such a step runs."""
        ...

    def refuse(self, message: str) -> str:
        """Return `message`, the text of an error about an operation that shards can't do, and add whose operation it was."""
        ...


@dataclass(eq=False)
class SingleComm:
    """The :class:`ScalarComm` of a group of one rank, which sends nothing."""

    size: int = 1
    rank: int = 0
    world_rank: int = 0
    unknown_step: UnknownStep | None = None  # see ScalarComm
    bytes_sent: int = 0

    @property
    def data_parallel(self) -> SingleComm:
        return self

    def all_reduce(self, tensor: torch.Tensor, op: str, what: str) -> torch.Tensor:
        return tensor

    def all_gather(self, tensor: torch.Tensor, what: str) -> torch.Tensor:
        return tensor.unsqueeze(0)

    def broadcast(self, tensor: torch.Tensor, source: int, what: str) -> None:
        pass


_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN} if dist.is_available() else {}


@dataclass(eq=False)
class ScalarComm:
    """The collectives that the user's own code asks for (norms, `full_tensor`).

    They block, and run in a process group of their own, so that they cannot pair with a parameter gather or a gradient
    reduction of another rank.
    """

    channel: Channel
    watch: Watch
    size: int
    rank: int
    over_replicas: ScalarComm | None = None  # over all ranks; None where no other ranks have the same shards
    device: torch.device | None = (
        None  # the device that tensors are copied to before they are sent (for shards in host memory)
    )
    unknown_step: UnknownStep | None = None  # the step that may be running
    bytes_sent: int = 0  # of tensors gathered for the user's code; small messages don't count

    @property
    def world_rank(self) -> int:
        """The number of this rank among all ranks of the engine, for error messages."""
        return self.watch.rank

    @property
    def data_parallel(self) -> ScalarComm:
        """The communicator over all ranks whose gradients are averaged, whichever ranks share a replica."""
        return self.over_replicas or self

    def all_reduce(self, tensor: torch.Tensor, op: str, what: str) -> torch.Tensor:
        self.watch.host_barrier(what)
        name, ordered, sent = self.channel.name, self.watch.polls, self._here(tensor)
        blocking(self.watch, name, what, dist.all_reduce, sent, op=_OPS[op], ordered=ordered)
        return tensor if sent is tensor else tensor.copy_(sent)

    def _here(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.device is None else tensor.to(self.device)

    def all_gather(self, tensor: torch.Tensor, what: str) -> torch.Tensor:
        sent = self._here(tensor).contiguous()
        out = sent.new_empty((self.size, *tensor.shape))
        parts = out.view(-1), sent.view(-1)
        self.watch.host_barrier(what)
        blocking(self.watch, self.channel.name, what, all_gather_single, *parts, ordered=self.watch.polls)
        return out.to(tensor.device)

    def broadcast(self, tensor: torch.Tensor, source: int, what: str) -> None:
        sent = self._here(tensor)
        self.watch.host_barrier(what)
        name, ordered = self.channel.name, self.watch.polls
        blocking(self.watch, name, what, dist.broadcast, sent, group_src=source, ordered=ordered)
        if sent is not tensor:
            tensor.copy_(sent)
