"""The process groups that carry the engine's collectives: made once for each group of the user's, closed when it goes."""

from __future__ import annotations

import ctypes
import time
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

from .errors import MissingRankError
from .watch import caller_line


@dataclass(eq=False)
class Groups:
    """The process groups of one set of ranks. Made once per user group and shared by all engines over it."""

    gather: Any
    reduce: Any
    scalar: Any
    control: Any
    broken: str = ""  # why no further collective may be issued
    # Works nobody has waited for, and the buffer each may still write to: an engine may be dropped before they end.
    written: dict[Any, torch.Tensor] = field(default_factory=dict)
    unfinished: dict[str, Any] = field(default_factory=dict)  # by channel: the latest work nobody has waited for

    def __post_init__(self) -> None:
        # Runs when the groups go, or at exit.
        weakref.finalize(self, _keep_unfinished, vars(self).copy())

    def forget_ended(self) -> None:
        """Let go of the buffers of works that have ended without anybody waiting for them."""
        for work in [work for work in self.written if work.is_completed()]:
            del self.written[work]


def _keep_unfinished(groups: dict[str, Any]) -> None:
    """Let a group in which a collective has stayed without its partner live as long as the process.

    Gloo can't abort a collective. The group's destructor waits for it, and two ranks that destroy such groups in
    different order would wait for each other until the group's timeout, half an hour by default. When a process ends,
    its partners' collectives end with an error.
    """
    if any(not work.is_completed() for work in groups["unfinished"].values()):
        # A list of this module would be emptied at exit, and the destructors run.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(groups))


# Communicators cost memory and set-up time, and a program may shard many models over one group. The user's group object
# is the key and the entry dies with it, so this is a cache that no behaviour depends on.
_groups: weakref.WeakKeyDictionary[Any, Groups] = weakref.WeakKeyDictionary()


def _meet(group: Any, ranks: list[int], timeout: float) -> str:
    """Wait for every rank: `new_group` alone would wait for the group's own timeout, half an hour by default.

    Returns the key under which the caller counts the groups it has made: a retry must not take a rank's earlier arrival
    for a new one.
    """
    if dist.get_backend(group) == "fake":  # no other rank exists
        return ""
    store = dist.distributed_c10d._get_default_store()  # no public accessor exists (torch 2.11 to 2.13)
    name, rank = f"torch_shard/meet/{group.group_name}", dist.get_rank()
    made = f"{name}/made/{rank}"
    arrived = f"{name}/{store.add(made, 0)}"
    store.set(f"{arrived}/{rank}", "here")
    deadline = time.monotonic() + timeout
    while missing := [r for r in ranks if not store.check([f"{arrived}/{r}"])]:
        if time.monotonic() > deadline:
            store.delete_key(f"{arrived}/{rank}")
            raise MissingRankError(
                f"rank {rank} waited {timeout:g} s in shard() at {caller_line()} for ranks {missing}. It is collective: call it "
                "on every rank, with the same settings, and see whether it failed there."
            )
        time.sleep(0.005)
    return made


def groups_for(group: Any, single_communicator: bool, timeout: float) -> Groups:
    """Collective over `group` at its first use."""
    key = group
    found = _groups.get(key)
    alive = dist.distributed_c10d._world.pg_map  # a program may have destroyed groups it did not make
    if found is None or found.broken or any(g not in alive for g in (found.gather, found.scalar, found.control)):
        ranks = dist.get_process_group_ranks(group)

        def new() -> Any:
            return dist.new_group(ranks, use_local_synchronization=len(ranks) != dist.get_world_size())

        # One NCCL communicator serialises its collectives even on different streams, hence one each for gathers and
        # reductions; `single_communicator` is the fallback where two cannot be had. The user's own group is left alone:
        # a gather that stays without its partner must not make it unusable.
        made = _meet(group, ranks, timeout)
        gather = new()
        found = Groups(gather=gather, reduce=gather if single_communicator else new(), scalar=new(), control=new())
        _groups[key] = found
        if made:
            dist.distributed_c10d._get_default_store().add(made, 1)
    return found
