"""The process groups of the engines over one user group: how they are made, kept, given up and shared."""

from __future__ import annotations

import contextlib
import ctypes
import json
import weakref
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from ..errors import SetupError
from ..layout.rank_topology import Topology
from .rendezvous import _meet, exchange_texts
from .store_messages import Messages
from .work import default_store

__all__ = [
    "group_timeout",
]


_DEFAULT_TIMEOUT = 1800.0  # seconds


def group_timeout(device: torch.device) -> float:
    """Return the seconds that collectives on `device` wait in the default process group.

    Front ends take this for the engine's timeout if the user has chosen none. If the backend doesn't tell its timeout, the
    result is torch's default.
    """
    if not dist.is_available():  # this build of torch has no default either
        return _DEFAULT_TIMEOUT
    c10d: Any = dist.distributed_c10d
    if not dist.is_initialized():
        return float(c10d.default_pg_timeout.total_seconds())
    group: Any = dist.group.WORLD
    try:
        timeout = group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):  # the backend has no such options, or there is none for this device
        timeout = c10d._get_default_timeout(c10d.Backend(dist.get_backend(group)))
    return float(timeout.total_seconds())


@dataclass(frozen=True)
class GivenUp:
    """The error for which a rank issues no further collective in some groups."""

    rank: int
    kind: str  # the name of the error's class
    text: str


@dataclass(frozen=True, eq=False)
class SubGroups:
    """This rank's process groups if there are several replicas of the parameters, or several data-parallel groups.

    A field is None where another group of these, or the group of all ranks, serves its purpose.
    """

    gather: Any = None  # over the ranks that share a replica
    reduce: Any = None  # over the same ranks; if each rank has a full replica, over the ranks of a data-parallel group
    scalar: Any = None
    replica: Any = None  # over the ranks of a data-parallel group that have the same shard
    data_parallel: Any = None
    full_model: Any = None  # over the ranks that together have one replica of every tensor-parallel part
    tp_replica: Any = (
        None  # over the ranks with the same shard of parameters that are equal in all data-parallel groups
    )
    # Reductions that wait for their inter-replica all-reduce, in the order in which all ranks began them. Several engines share
    # the group, and so this queue.
    waiting: deque[Any] = field(default_factory=deque)

    def all(self) -> tuple[Any, ...]:
        """Return the process groups that were made."""
        groups = (
            self.gather,
            self.reduce,
            self.scalar,
            self.replica,
            self.data_parallel,
            self.full_model,
            self.tp_replica,
        )
        return tuple(group for group in groups if group is not None)


@dataclass(eq=False)
class ProcessGroups:
    """The process groups over one set of ranks, made once for each user group and shared by all engines over that group."""

    gather: Any
    reduce: Any
    scalar: Any  # with NCCL it has a Gloo backend for CPU tensors, too
    control: Any
    key: str = ""  # prefix of the keys in the default store; "" if no other rank exists
    broken: str = ""  # why no further collective may be issued
    exchanges: int = 0  # see Watch.exchange
    issued: dict[str, int] = field(default_factory=dict)  # collectives of this rank, by channel; of all engines
    # Works that nobody has waited for, with the buffers that each may still read or write: an engine may be dropped before its
    # works end.
    written: dict[Any, Any] = field(default_factory=dict)
    unfinished: dict[str, Any] = field(default_factory=dict)  # by channel, the latest work that nobody has waited for
    timeout: timedelta | None = None  # the process groups' timeout; None for torch's default
    streams: dict[torch.device, tuple[Any, Any]] = field(
        default_factory=dict
    )  # CUDA: the streams for gathers and for reductions
    sub_groups: dict[Topology, SubGroups] = field(default_factory=dict)
    # The groups of the secondary shards, for the gathers of backward among fewer ranks (reshard_after_forward=<int>).
    secondary: dict[tuple[Topology, int], Any] = field(default_factory=dict)

    @property
    def meet(self) -> Any:
        """The group in which the host waits for the ranks that a blocking collective needs."""
        return self.scalar

    def __post_init__(self) -> None:
        # The finalizer runs when this object is deleted, or at exit.
        weakref.finalize(self, _keep_unfinished, vars(self).copy())

    def streams_on(self, device: torch.device) -> tuple[Any, Any]:
        """Return the streams for gathers and for reductions on a GPU.

        All engines over these groups share the streams: the allocator keeps a pool of memory for each stream, and torch has
        only 32 streams before they repeat.
        """
        if device not in self.streams:
            # High priority, so that a copy into a buffer doesn't wait behind matrix products that it could overlap with.
            self.streams[device] = tuple(torch.cuda.Stream(device, priority=-1) for _ in range(2))  # type: ignore[assignment]
        return self.streams[device]

    def give_up(self, rank: int, error: Exception) -> None:
        """Forbid further collectives in these groups, after one was left without its partner, and tell the other ranks."""
        self.broken = str(error)
        if self.key:
            with contextlib.suppress(RuntimeError):  # the store may be gone with its rank
                store, reason = default_store(), json.dumps([rank, type(error).__name__, str(error)])
                store.compare_set(f"{self.key}/given_up", "", reason)  # the first reason counts
                Messages(store, self.key).announce()

    def given_up(self) -> GivenUp | None:
        """Return which rank gave up first, and why; None if no rank has."""
        if self.key:
            with contextlib.suppress(RuntimeError):
                store, key = default_store(), f"{self.key}/given_up"
                if store.check([key]):
                    return GivenUp(*json.loads(store.get(key)))
        return None

    def is_usable(self) -> bool:
        """Return True if this rank can use all of the groups: a program may have destroyed groups that it did not make."""
        alive = dist.distributed_c10d._world.pg_map
        groups = [self.gather, self.reduce, self.scalar, self.control, *self.secondary.values()]
        groups += [group for parts in self.sub_groups.values() for group in parts.all()]
        return not self.broken and all(group in alive for group in groups)

    def forget_ended(self) -> None:
        """Drop the buffers of works that have ended without anybody waiting for them."""
        for work in [work for work in self.written if work.is_completed()]:
            del self.written[work]


def _keep_unfinished(groups: dict[str, Any]) -> None:
    """Keep a group alive as long as the process if a collective in it has been left without its partner.

    Gloo can't abort a collective. The group's destructor waits for it, and two ranks that destroy such groups in
    different order would wait for each other until the group's timeout, half an hour by default. When a process ends,
    its partners' collectives end with an error.
    """
    if any(not work.is_completed() for work in groups["unfinished"].values()):
        # A list in this module would be emptied at exit, and the destructors would run.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(groups))


# The groups by the user's group and by `single_communicator`. Communicators cost memory and set-up time, and a program may
# shard many models over one group. An entry dies with the user's group, so this is a cache that no behaviour depends on.
_groups: weakref.WeakKeyDictionary[Any, dict[bool, ProcessGroups]] = weakref.WeakKeyDictionary()


@contextlib.contextmanager
def _made_by_its_members(name: str) -> Iterator[None]:
    """Give a process group that is made inside this context, by its members alone, this name and a communicator of its own.

    torch names such a group after the number of groups in the process. This number differs between ranks that belong to
    different other groups, and they would wait for each other under different names. And if the default group is bound to
    a device (``init_process_group(device_id=...)``), a new NCCL communicator is split from the default communicator, and a
    split needs all ranks of the default group.
    """
    c10d: Any = dist.distributed_c10d
    original, default = c10d._process_group_name, c10d._get_default_group()
    bound = default.bound_device_id
    c10d._process_group_name = lambda *_, **__: name
    if bound is not None:
        default.bound_device_id = None
    try:
        yield
    finally:
        c10d._process_group_name = original
        if bound is not None:
            default.bound_device_id = bound


def default_group() -> Any:
    """Return torch's default process group; None where none is initialised."""
    return dist.group.WORLD


def ranks_of(group: Any = None) -> list[int]:
    """Return the global ranks of a process group, the default one by default; ``[0]`` where none is initialised."""
    return dist.get_process_group_ranks(group) if dist.is_initialized() else [0]


def backend_of(group: Any, device_type: str) -> str:
    """Return the backend that serves a type of device in `group`, or "" if none does.

    torch's `get_backend` would name only one of several backends.
    """
    entries = dist.get_backend_config(group).split(",")
    return dict(entry.split(":", 1) for entry in entries if ":" in entry).get(device_type, "")


def _longer(timeout: float) -> timedelta | None:
    """Return a timeout for process groups that is longer than the engine's `timeout`, so that the engine's error comes first.

    None stands for torch's default, which is ten minutes with NCCL and thirty with Gloo.
    """
    if timeout + 60 <= 600:
        return None
    return max(timedelta(seconds=timeout + 60), dist.distributed_c10d.default_pg_timeout)


def groups_for(group: Any, single_communicator: bool, timeout: float) -> ProcessGroups:
    """Return the engines' process groups over the ranks of `group`; make them where there are none to use. Collective."""
    kept = _groups.setdefault(group, {})
    found = kept.get(single_communicator)
    usable = found is not None and found.is_usable()
    ranks = dist.get_process_group_ranks(group)
    key = ""
    if dist.get_backend(group) != "fake":  # there no other rank exists
        key = _meet(group, ranks, single_communicator, usable, timeout, "" if found is None else found.key)
        usable = not key
    if found is None or not usable:
        limit = _longer(timeout)
        part = len(ranks) != dist.get_world_size()

        # Without it a new group would have the default group's backends, which may differ from those of `group`.
        own = dist.get_backend_config(group) if key else None

        def new(purpose: str, backend: str | None = own) -> Any:
            with _made_by_its_members(f"{key}/{purpose}") if part and key else contextlib.nullcontext():
                return dist.new_group(ranks, timeout=limit, backend=backend, use_local_synchronization=part)

        # An NCCL communicator serialises its collectives even on different streams. Gathers and reductions therefore have
        # one communicator each, unless `single_communicator` is set because two cannot be had. The user's own group is not
        # used: a gather that is left without its partner must not make that group unusable.
        gather = new("gather")
        reduce = gather if single_communicator else new("reduce")
        # For small messages between hosts. On a GPU a message would wait in the queue behind a gather that may lack its partner.
        control = new("control", "gloo" if key else own)
        scalar = new("scalar", "cpu:gloo,cuda:nccl" if backend_of(group, "cuda") == "nccl" else own)
        found = ProcessGroups(gather, reduce, scalar, control, key, timeout=limit)
        kept[single_communicator] = found
    return found


def sub_groups_for(groups: ProcessGroups, group: Any, topology: Topology, single_communicator: bool) -> SubGroups:
    """Return this rank's process groups under `topology`, and make them at the first call. Collective.

    `groups` belong to `group`. All ranks must already know that they have the same `topology`.
    """
    found = groups.sub_groups.get(topology)
    if found is None:
        me, number = dist.get_rank(group), len(groups.sub_groups)
        own = dist.get_backend_config(group) if groups.key else None
        scalars = "cpu:gloo,cuda:nccl" if backend_of(group, "cuda") == "nccl" else own

        def new(purpose: str, members: tuple[int, ...], backend: str | None = own) -> Any:
            return _among(groups, group, f"{number}/{purpose}", members, backend)

        shard_group, data_parallel_group = topology.shard_group_of(me), topology.data_parallel_group_of(me)
        made: dict[str, Any] = {}
        if topology.size > 1:
            made["gather"] = new("gather", shard_group)
            made["reduce"] = made["gather"] if single_communicator else new("reduce", shard_group)
            made["scalar"] = new("scalar", shard_group, scalars)
        if topology.is_hybrid:
            made["replica"] = new("replica", topology.replica_group_of(me))
        if topology.data_parallel_groups > 1:
            if topology.replicas > 1:
                if topology.size == 1:
                    made["reduce"] = new("reduce", data_parallel_group)
                made["data_parallel"] = new("data_parallel", data_parallel_group, scalars)
                made["full_model"] = new("full_model", topology.full_model_group_of(me), scalars)
            made["tp_replica"] = new("tp_replica", topology.tp_replica_group_of(me))
        found = groups.sub_groups[topology] = SubGroups(**made)
    return found


def secondary_group_for(groups: ProcessGroups, group: Any, topology: Topology, size: int) -> Any:
    """Return the process group of the `size` ranks that keep a unit's secondary shards between forward and backward.

    Collective, under the same conditions as :func:`sub_groups_for`.
    """
    found = groups.secondary.get((topology, size))
    if found is None:
        members = topology.secondary_group_of(dist.get_rank(group), size)
        own = dist.get_backend_config(group) if groups.key else None
        found = groups.secondary[topology, size] = _among(
            groups, group, f"{len(groups.secondary)}/secondary", members, own
        )
    return found


def _among(groups: ProcessGroups, group: Any, purpose: str, members: tuple[int, ...], backend: str | None) -> Any:
    """Make a process group of some ranks of `group`. Collective over these ranks only."""
    ranks = dist.get_process_group_ranks(group)
    name = f"{groups.key}/{purpose}/{members[0]}"
    with _made_by_its_members(name) if groups.key else contextlib.nullcontext():
        return dist.new_group(
            [ranks[m] for m in members],
            timeout=groups.timeout,
            backend=backend,
            use_local_synchronization=bool(groups.key),
        )


_made: weakref.WeakValueDictionary[tuple[int, ...], Any] = weakref.WeakValueDictionary()


def group_over(ranks: list[int], timeout: float) -> Any:
    """Return a process group over global `ranks`: the default group if these are all ranks. Collective over `ranks`.

    Raises:
        MissingRankError: a rank has not come within `timeout` seconds.
        SetupError: this rank is not one of `ranks`.
    """
    if dist.get_rank() not in ranks:
        raise SetupError(f"mesh: rank {dist.get_rank()} is not in it ({ranks}); call shard() on its ranks.")
    if len(ranks) == dist.get_world_size():
        return dist.group.WORLD
    found = _made.get(tuple(ranks))
    if found is None or found not in dist.distributed_c10d._world.pg_map:
        # Each rank counts for itself: all of `ranks` come here equally often and in the same order.
        number = default_store().add(f"torch_shard/made/{ranks}/{dist.get_rank()}", 1)
        name = f"torch_shard/over/{ranks}/{number}"
        exchange_texts(ranks, name, "", timeout)
        with _made_by_its_members(name):
            found = _made[tuple(ranks)] = dist.new_group(
                ranks, timeout=_longer(timeout), use_local_synchronization=True
            )
    return found
