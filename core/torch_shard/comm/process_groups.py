"""The process groups of all engines over one user group: how they are made, shared, replaced and given up.

A process group is made at the first use of a channel (:class:`.work.Channel`) and serves all engines over the user's group.
Before each engine's set-up the ranks agree whether the process groups of earlier engines can still be used.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import weakref
import zlib
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from ..errors import ConfigError, SetupError
from ..layout.rank_topology import Topology
from .comparisons import Comparisons
from .multi_engine_order import EngineOrder
from .one_sided import wire
from .one_sided.departure import stay_until_all_leave
from .one_sided.partners import Partners
from .one_sided.service import Service
from .registered_memory import RegisteredMemory
from .rendezvous import exchange_texts
from .store_messages import Messages
from .streams import streams_of
from .work import default_store

_DEFAULT_TIMEOUT = 1800.0  # seconds


@torch._disable_dynamo  # type: ignore[attr-defined]  # it can't follow the group in a compiled step of Lightning
def group_timeout(device: torch.device, group: Any = None) -> float:
    """Return the seconds that collectives on `device` wait in a process group, the default one by default.

    Front ends take this for the engine's timeout if the user has chosen none. If the backend doesn't tell its timeout, the
    result is torch's default.
    """
    if not dist.is_available():  # this build of torch has no default either
        return _DEFAULT_TIMEOUT
    c10d: Any = dist.distributed_c10d
    if not dist.is_initialized():
        return float(c10d.default_pg_timeout.total_seconds())
    group = dist.group.WORLD if group is None else group
    try:
        timeout = group._get_backend(device).options._timeout
    except (AttributeError, RuntimeError):  # the backend has no such options, or there is none for this device
        timeout = c10d._get_default_timeout(c10d.Backend(dist.get_backend(group)))
    return float(timeout.total_seconds())


class Failure(NamedTuple):
    """The error after which a rank issues no further collective in some process groups."""

    rank: int
    kind: str  # the name of the error's class
    text: str


@dataclass(eq=False)
class ProcessGroups:
    """The process groups over the ranks of one user group, shared by all engines over that group.

    Attributes:
        ranks: the global ranks.
        key: the prefix of the keys in the default store; "" if no other rank exists.
        backend: the backends of the user's group, as torch writes them; None for torch's default.
        timeout: the process groups' timeout; None for torch's default.
        broken: why no further collective may be issued; "" as long as all may.
        exchanges: the number of :meth:`.watchdog.Watchdog.exchange` calls.
        made: the process groups, by the name of their channel.
        begun: the channels whose groups have had a first collective, where that takes the ranks long.
        topologies: the topologies of the engines so far, in the same order on all ranks.
        issued: the number of collectives that this rank has issued, by channel, of all engines.
        in_flight: the latest collective that has not been waited for, by channel.
        buffers: the collectives that have not been waited for, each with its arguments and all else that it may still read or
            write: an engine may be dropped before its collectives end.
        waiting: the reductions that wait for their inter-replica all-reduce, by channel, in the order in which all ranks began
            them.
        streams: what :meth:`streams_on` returns, by device.
        released: see :class:`.collectives.Collectives`.
        memory: the memory that is registered with the communicators, by device.
        engine_order: the engines over these groups, with the backwards that are running in them.
        comparisons: the comparisons of the ranks' operations, which a rank may leave to read alone.
        has_stepped: an optimizer of one of the engines has stepped.
    """

    ranks: list[int]
    key: str = ""
    backend: str | None = None
    timeout: timedelta | None = None
    broken: str = ""
    exchanges: int = 0
    made: dict[str, Any] = field(default_factory=dict)
    begun: set[str] = field(default_factory=set)
    topologies: list[Topology] = field(default_factory=list)
    issued: dict[str, int] = field(default_factory=dict)
    in_flight: dict[str, Any] = field(default_factory=dict)
    buffers: dict[Any, Any] = field(default_factory=dict)
    waiting: dict[str, deque[Any]] = field(default_factory=dict)
    streams: dict[torch.device, tuple[Any, Any, Any]] = field(default_factory=dict)
    released: set[Any] = field(default_factory=set)
    memory: dict[torch.device, RegisteredMemory] = field(default_factory=dict)
    engine_order: EngineOrder = field(default_factory=EngineOrder)
    comparisons: Comparisons = field(default_factory=Comparisons)
    has_stepped: bool = False

    def __post_init__(self) -> None:
        # The finalizer runs when this object is deleted, or at exit.
        weakref.finalize(self, _keep_unfinished, self.in_flight, self.made, self.buffers)

    def new_group(self, name: str, members: Sequence[int], backend: str | None) -> Any:
        """Make a process group of `members`, numbers of its ranks in :attr:`ranks`. Collective over them only."""
        ranks = [self.ranks[member] for member in members]
        members_only = bool(self.key) and len(ranks) < dist.get_world_size()
        with _made_by_its_members(f"{self.key}/{name}/{members[0]}") if members_only else contextlib.nullcontext():
            return dist.new_group(ranks, timeout=self.timeout, backend=backend, use_local_synchronization=members_only)

    def streams_on(self, device: torch.device) -> tuple[Any, Any, Any]:
        """Return the streams for gathers, for reductions, and for all-reduces between replicas, on an accelerator.

        All engines over these groups share the streams: the allocator keeps a pool of memory for each stream, and torch has
        only 32 streams before they repeat.
        """
        if device not in self.streams:
            # Urgent, so that a copy into a buffer doesn't wait behind matrix products that it could overlap with.
            own = streams_of(device)
            self.streams[device] = own.new(urgent=True), own.new(urgent=True), own.new(urgent=True)
        return self.streams[device]

    def abort(self, rank: int, error: Exception) -> None:
        """Forbid further collectives in these groups, after one was left without its partner, and tell the other ranks."""
        self.broken = str(error)
        if self.key:
            with contextlib.suppress(RuntimeError):  # the store may be gone with its rank
                store, reason = default_store(), json.dumps([rank, type(error).__name__, str(error)])
                store.compare_set(f"{self.key}/failure", "", reason)  # the first reason counts
                Messages(store, self.key).announce()

    def failure(self) -> Failure | None:
        """Return which rank gave up first, and why; None if no rank has."""
        if self.key:
            with contextlib.suppress(RuntimeError):
                store, key = default_store(), f"{self.key}/failure"
                if store.check([key]):
                    return Failure(*json.loads(store.get(key)))
        return None

    def is_usable(self) -> bool:
        """Return True if this rank can use all of the groups: a program may have destroyed groups that it did not make."""
        alive = dist.distributed_c10d._world.pg_map
        return not self.broken and all(group in alive for group in self.made.values())

    def forget_ended(self) -> None:
        """Drop the buffers of works that have ended without anybody waiting for them."""
        # A thread that reads a gradient may wait for one at the same time.
        for work in [work for work in list(self.buffers) if work.is_completed()]:
            self.buffers.pop(work, None)


def _keep_unfinished(in_flight: dict[str, Any], *others: Any) -> None:
    """Keep process groups, and the tensors of their collectives, as long as the process if a latest collective has not ended.

    Gloo can't abort a collective. The group's destructor waits for it, and two ranks that destroy such groups in
    different order would wait for each other until the group's timeout, half an hour by default. When a process ends,
    its partners' collectives end with an error.

    A collective that ends while the interpreter shuts down must not hold the last reference to a tensor: Gloo's thread would
    try to take the interpreter's lock. CPython before 3.14 then ends the thread, which is inside a destructor, and so the whole
    process aborts ("terminate called without an active exception").
    """
    if any(not work.is_completed() for work in in_flight.values()):
        # A list in this module would be emptied at exit, and the destructors would run.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object((in_flight, others)))


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
    return dist.get_process_group_ranks(group) if dist.is_available() and dist.is_initialized() else [0]


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


def groups_for(
    group: Any, device: torch.device, single_communicator: bool, timeout: float, settings: str
) -> tuple[ProcessGroups, bool]:
    """Return the engines' process groups over the ranks of `group`, and True if `settings` are equal on all ranks. Collective.

    If a rank can't use the groups of earlier engines any more (it gave up a collective in them, or destroyed them), new ones
    take their place on all ranks, also where the old ones still work.

    Raises:
        ConfigError: the ranks differ in `single_communicator`.
        MissingRankError: a rank has not come within `timeout` seconds.
    """
    kept = _groups.setdefault(group, {})
    found = kept.get(single_communicator)
    ranks = dist.get_process_group_ranks(group)
    if dist.get_backend(group) == "fake":  # no other rank exists
        if found is None:
            found = kept[single_communicator] = ProcessGroups(ranks, timeout=_longer(timeout))
        return found, True
    usable = found is not None and found.is_usable()
    mine = json.dumps([single_communicator, usable, zlib.crc32(settings.encode())])
    # Disjoint groups may share a name.
    key, texts = exchange_texts(ranks, f"torch_shard/shard/{group.group_name}/{ranks[0]}", mine, timeout)
    single, usable_on, digests = zip(*(json.loads(texts[rank]) for rank in ranks), strict=True)
    if len(set(single)) > 1:
        with_one = [rank for rank, one in zip(ranks, single, strict=True) if one]
        raise ConfigError(
            f"single_communicator: ranks {with_one} have True and ranks {sorted(set(ranks) - set(with_one))} have False; pass "
            "the same on all ranks."
        )
    if found is None or not all(usable_on):
        # Without `backend`, new groups would have the default group's backends, which may differ from those of `group`.
        found = ProcessGroups(ranks, key, dist.get_backend_config(group), _longer(timeout))
        _connect_services(found, timeout, max(timeout, group_timeout(device, group)))
        kept[single_communicator] = found
    return found, len(set(digests)) == 1


def _connect_services(groups: ProcessGroups, timeout: float, limit: float) -> None:
    """Start this rank's service for one-sided reads, and tell the other ranks its address. Collective.

    At the end of its script this rank serves for at most `limit` seconds more.
    """
    rank = groups.ranks.index(dist.get_rank())
    service = Service(rank)
    _, texts = exchange_texts(groups.ranks, f"{groups.key}/services", json.dumps(service.address._asdict()), timeout)
    addresses = [wire.Address(**json.loads(texts[other])) for other in groups.ranks]
    partners = Partners(rank, addresses, timeout)
    groups.comparisons.service, groups.comparisons.partners = service, partners
    stay_until_all_leave(service, partners, limit)


# By global ranks: the groups that `group_over` has made. Making one is collective, so each is shared while it is in use.
_made_over: weakref.WeakValueDictionary[tuple[int, ...], Any] = weakref.WeakValueDictionary()


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
    found = _made_over.get(tuple(ranks))
    if found is None or found not in dist.distributed_c10d._world.pg_map:
        name, _ = exchange_texts(ranks, f"torch_shard/over/{ranks}", "", timeout)
        with _made_by_its_members(name):
            found = dist.new_group(ranks, timeout=_longer(timeout), use_local_synchronization=True)
        _made_over[tuple(ranks)] = found
    return found
