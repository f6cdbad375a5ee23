"""The ranks of a self-test: their process group, and what they tell each other outside of the engine."""

from __future__ import annotations

import datetime
import os
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from ..comm.streams import streams_of
from .devices import count, make_current

PATIENCE = 120.0
"""The seconds that a rank waits for another one in the engine, which waits longer for a first step on a GPU."""
_GROUP_PATIENCE = 600.0
"""The seconds of the process group, over which DDP and FSDP2 send: kernels are compiled in their first step."""


class Ranks:
    """The ranks that ``torch.distributed.run`` has started. Making it is collective.

    Args:
        kind: ``"cpu"``, over Gloo, or ``"cuda"``, over NCCL.
        shares: whether ranks share GPUs; else each has one of its own.

    Attributes:
        rank: this rank.
        world: the number of ranks.
        device: the device of this rank.
    """

    def __init__(self, kind: str, shares: bool = False) -> None:
        self.rank, self.world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.device = torch.device(kind)
        if kind != "cpu":
            self.device = torch.device(kind, int(os.environ["LOCAL_RANK"]) % count())
            make_current(self.device)
        if shares:
            # NCCL refuses two ranks of one host on one GPU, so that each calls itself a host of its own. They send by sockets.
            os.environ.update(NCCL_HOSTID=f"rank {self.rank}", NCCL_SOCKET_IFNAME="lo")
        self._store, _, _ = next(rendezvous("env://"))
        dist.init_process_group(
            "gloo" if kind == "cpu" else "cpu:gloo,cuda:nccl",
            store=PrefixStore("selftest", self._store),
            rank=self.rank,
            world_size=self.world,
            timeout=datetime.timedelta(seconds=_GROUP_PATIENCE),
        )

    def gather(self, value: Any) -> list[Any]:
        """Return each rank's `value`, through host memory. Collective."""
        found: list[Any] = [None] * self.world
        dist.all_gather_object(found, value)
        return found

    def meet(self) -> None:
        """Wait for this rank's device and for the other ranks. Collective."""
        streams_of(self.device).synchronize()
        self.gather(None)

    def all_good(self, case: str, good: bool, seconds: float) -> bool:
        """Return True if `case` ran without an error on all ranks. Collective, but not through the process group.

        After an error the ranks may be in the middle of different collectives, so they tell each other through the store.
        """
        self._store.set(f"good/{case}/{self.rank}", str(int(good)))
        keys = [f"good/{case}/{rank}" for rank in range(self.world)]
        self._store.wait(keys, datetime.timedelta(seconds=seconds))
        return all(self._store.get(key) == b"1" for key in keys)

    def leave(self) -> None:
        """Leave the process group. Collective."""
        self.gather(None)
        dist.destroy_process_group()
