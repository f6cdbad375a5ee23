"""The collectives for parameters and gradients: which group, which stream, how many bytes, how long to wait.

Every blocking wait of the engine goes through :class:`Watch`, so that a rank whose partner does not come gets an
error that says what each rank is waiting in, instead of hanging until the process group's own timeout.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import sys
import time
import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from .errors import DivergenceError, MissingRankError, ShardError
from .log import logger
from .versions import at_least

# torch 2.13 renamed the single-tensor collectives and warns about the old names; 2.11 and 2.12 lack the new ones.
_all_gather = getattr(dist, "all_gather_single" if at_least("2.13") else "all_gather_into_tensor", None)
_reduce_scatter = getattr(dist, "reduce_scatter_single" if at_least("2.13") else "reduce_scatter_tensor", None)

# Seconds of silence before a rank says, through the store, what it is waiting in.
_FIRST_TICK = 1.0


def caller_line() -> str:
    """`file:line` of the innermost frame outside this package and torch: where the user's code waits."""
    frame: Any = sys._getframe(1)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.split(".", 1)[0] not in ("torch", "torch_shard", "contextlib"):
            return f"{frame.f_code.co_filename}:{frame.f_lineno}"
        frame = frame.f_back
    return "unknown line"


class Channel:
    """One process group used for one purpose; ``issued`` counts its collectives on this rank.

    Counting one more raises once a collective of the groups was left without its partner: the next one could pair with
    it, and give wrong numbers.
    """

    def __init__(self, name: str, groups: Groups) -> None:
        self.name, self.groups, self._issued = name, groups, 0

    @property
    def group(self) -> Any:
        return getattr(self.groups, self.name)

    @property
    def issued(self) -> int:
        return self._issued

    @issued.setter
    def issued(self, value: int) -> None:
        self.check()
        self._issued = value

    def check(self) -> None:
        if self.groups.broken:
            raise DivergenceError(
                "the ranks' collectives are out of step since an earlier error, so this engine can't go on: restart from a "
                f"checkpoint, or shard a new model. The earlier error: {self.groups.broken}"
            )


@dataclass(eq=False)
class Pending:
    """A collective in flight. ``wait`` returns when its result may be read by the current stream."""

    watch: Watch
    channel: Channel
    number: int
    what: str
    work: Any
    event: Any = None  # CUDA: recorded behind the collective on its side stream

    def done(self) -> bool:
        return self.work is None or bool(self.work.is_completed())

    def settle(self, seconds: float) -> bool:
        """Wait at most this long; False if it is still going on. On CUDA never blocks."""
        return self.done() or (self.event is None and _bounded_wait(self.work, seconds, self, self.watch.rank))

    def wait(self) -> None:
        if self.work is not None:
            self.watch.wait(self)
            self.work = None
        if self.event is not None:
            # Hazard: the compute stream must not read the buffer before the side stream has filled it.
            torch.cuda.current_stream().wait_event(self.event)
            self.event = None


def _unowned_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory as bytes, without a reference to its storage.

    Gloo's worker thread lets go of a collective's tensors some time after `wait` has returned. The engine reads the
    storage's use count to learn whether autograd saved something of it, and must not find Gloo there. The memory stays
    valid: it is released only after `wait`.
    """
    size = tensor.numel() * tensor.element_size()
    return torch.frombuffer((ctypes.c_char * size).from_address(tensor.data_ptr()), dtype=torch.uint8)


class Watch:
    """Waits with a limit, and explains a wait that is not coming to an end.

    A rank that has waited for a second posts in the group's store what it waits for and how many collectives of each
    channel it has issued. Two ranks that each wait for something the other has not issued can never go on: that is
    reported at once. A partner that posts nothing is reported at ``timeout`` seconds.
    """

    def __init__(self, rank: int, size: int, ranks: list[int], timeout: float, key: str) -> None:
        self.rank, self.size, self.ranks, self.timeout, self.key = rank, size, ranks, timeout, key
        self.channels: dict[str, Channel] = {}

    def _post(self, store: Any, pending: Pending | None) -> None:
        text = ""
        if pending is not None:
            issued = {c.name: c.issued for c in self.channels.values()}
            text = json.dumps([pending.channel.name, pending.number, pending.what, caller_line(), issued])
        store.set(f"{self.key}/{self.rank}", text)

    def _read(self, store: Any) -> dict[int, Any]:
        posts = {}
        for rank in range(self.size):
            key = f"{self.key}/{rank}"
            if rank != self.rank and store.check([key]):
                text = store.get(key).decode()
                if text:
                    posts[rank] = json.loads(text)
        return posts

    def wait(self, pending: Pending) -> None:
        work = pending.work
        if work.is_completed():
            work.wait()
            return
        if pending.event is not None:  # NCCL: nothing to block on here, the streams order themselves
            work.wait()
            return
        pending.channel.check()
        if _bounded_wait(work, min(_FIRST_TICK, self.timeout), pending, self.rank):
            return
        store = dist.distributed_c10d._get_default_store()  # no public accessor exists (torch 2.11 to 2.13)
        deadline = time.monotonic() + self.timeout - _FIRST_TICK
        self._post(store, pending)
        try:
            while True:
                if _bounded_wait(work, 0.5, pending, self.rank):
                    return
                posts = self._read(store)
                stuck = self._deadlocked(pending, posts)
                if stuck:
                    # Leave the others time to read this post before it is withdrawn.
                    time.sleep(1.0)
                    raise DivergenceError(
                        f"rank {self.rank} waits in {pending.what} at {caller_line()}, while "
                        + "; ".join(f"rank {r} waits in {posts[r][2]} at {posts[r][3]}" for r in stuck)
                        + ". The ranks run different operations: every rank must run the same forwards, backwards, "
                        "norms, gathers and saves in the same order (look for code under `if rank == ...`)."
                    )
                if time.monotonic() > deadline:
                    raise MissingRankError(self._explain(pending, posts))
        except ShardError as error:
            pending.channel.groups.broken = str(error)
            raise
        finally:
            self._post(store, None)

    def _deadlocked(self, pending: Pending, posts: dict[int, Any]) -> list[int]:
        stuck = []
        for rank, (channel, number, _what, _line, issued) in posts.items():
            mine = self.channels.get(channel)
            they_lack_mine = issued.get(pending.channel.name, 0) < pending.number
            i_lack_theirs = mine is not None and mine.issued < number
            if they_lack_mine and i_lack_theirs:
                stuck.append(rank)
        return stuck

    def _explain(self, pending: Pending, posts: dict[int, Any]) -> str:
        others = []
        for rank in range(self.size):
            if rank == self.rank:
                continue
            if rank in posts:
                others.append(f"rank {rank} waits in {posts[rank][2]} at {posts[rank][3]}")
            else:
                others.append(f"rank {rank} waits in no operation of the engine (it runs other code, or is gone)")
        return (
            f"rank {self.rank} waited {self.timeout:g} s in {pending.what} at {caller_line()}; {'; '.join(others)}. "
            "The operation is collective: call it on every rank (look for code under `if rank == ...`), or raise "
            "ShardConfig(timeout=...) if ranks may be that far apart."
        )


def _bounded_wait(work: Any, seconds: float, pending: Pending, rank: int) -> bool:
    """True when the work is done, False when `seconds` passed without; a failed work raises."""
    try:
        work.wait(timedelta(seconds=seconds))
        return True
    except RuntimeError as error:
        if not work.is_completed():
            return False
        raise MissingRankError(
            f"rank {rank}: {pending.what} failed at {caller_line()}: another rank has probably died; see its log. ({error})"
        ) from error


@dataclass(eq=False)
class SingleComm:
    """The scalar communicator of a group of one."""

    size: int = 1
    rank: int = 0

    def all_reduce(self, tensor: torch.Tensor, op: str, what: str) -> torch.Tensor:
        return tensor

    def all_gather(self, tensor: torch.Tensor, what: str) -> torch.Tensor:
        return tensor.unsqueeze(0)


_OPS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN} if dist.is_available() else {}


@dataclass(eq=False)
class ScalarComm:
    """Reductions that the user's own code asks for (norms, `full_tensor`): blocking, in a group of their own, so that
    they cannot pair with a gather or a gradient reduction of another rank."""

    channel: Channel
    watch: Watch
    size: int
    rank: int

    def all_reduce(self, tensor: torch.Tensor, op: str, what: str) -> torch.Tensor:
        _blocking(self.watch, self.channel, what, dist.all_reduce, tensor, op=_OPS[op])
        return tensor

    def all_gather(self, tensor: torch.Tensor, what: str) -> torch.Tensor:
        out = tensor.new_empty((self.size, *tensor.shape))
        _blocking(self.watch, self.channel, what, _all_gather, out.view(-1), tensor.contiguous().view(-1))
        return out


def _blocking(watch: Watch, channel: Channel, what: str, function: Any, *args: Any, **kwargs: Any) -> None:
    channel.issued += 1
    work = function(*args, group=channel.group, async_op=True, **kwargs)
    Pending(watch, channel, channel.issued, what, work).wait()


@dataclass(eq=False)
class Groups:
    """The process groups of one set of ranks. Made once per user group and shared by all engines over it."""

    gather: Any
    reduce: Any
    scalar: Any
    control: Any
    broken: str = ""  # why no further collective may be issued
    # Buffers that a collective may still write to: their engine may be dropped before the collective has ended.
    written: list[tuple[Any, torch.Tensor]] = field(default_factory=list)


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


@dataclass(eq=False)
class Collectives:
    """Gather and reduce for one engine. ``size`` is the number of ranks that share the parameters (1 under
    ``no_shard``), ``world`` the number whose gradients are averaged."""

    device: torch.device
    world: int
    world_rank: int
    size: int
    rank: int
    watch: Watch
    scalar: ScalarComm | SingleComm
    gather_channel: Channel | None = None
    reduce_channel: Channel | None = None
    control_channel: Channel | None = None
    gloo: bool = True
    bytes_sent: int = 0
    written: list[tuple[Any, torch.Tensor]] = field(default_factory=list)
    gather_stream: Any = None
    reduce_stream: Any = None
    parked: list[torch.Tensor] = field(default_factory=list)  # buffers that a broken collective may still write to
    _spare: dict[Any, list[torch.Tensor]] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict[int, Any]) -> Collectives:
        return self  # groups and streams belong to the process, not to a model

    # -- streams ------------------------------------------------------------------------------------------------
    @contextlib.contextmanager
    def _on(self, stream: Any) -> Iterator[None]:
        if stream is None:
            yield
            return
        # Hazard: the side stream must not overwrite or read a buffer before compute issued so far is through with it.
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            yield

    def gathering(self) -> contextlib.AbstractContextManager[None]:
        """The stream that owns gathered buffers: their storage is resized and filled here."""
        return self._on(self.gather_stream)

    def _track(self, channel: Channel, what: str, work: Any, stream: Any) -> Pending:
        event = None
        if stream is not None:
            work.wait()  # orders the side stream behind NCCL's own; does not block the host
            event = torch.cuda.Event()
            event.record(stream)
        return Pending(self.watch, channel, channel.issued, what, work, event)

    # -- parameters ---------------------------------------------------------------------------------------------
    def all_gather(self, full: torch.Tensor, what: str) -> Pending:
        """Fill `full` (1-D, ``size`` equal slots) from the slot that each rank has written. Call under `gathering()`."""
        channel = self.gather_channel
        assert channel is not None and _all_gather is not None
        shard = full.numel() // self.size
        own = full.narrow(0, self.rank * shard, shard)
        channel.issued += 1
        self.bytes_sent += (self.size - 1) * shard * full.element_size()
        if not full.numel():  # nothing but zero-element parameters
            return Pending(self.watch, channel, channel.issued, what, None)
        buffer = full
        if full.device.type == "cpu":
            full, own = _unowned_bytes(full), _unowned_bytes(own)
        work = _all_gather(full, own, group=channel.group, async_op=True)
        self.written[:] = [entry for entry in self.written if not entry[0].is_completed()]
        self.written.append((work, buffer))
        return self._track(channel, what, work, self.gather_stream)

    # -- gradients ----------------------------------------------------------------------------------------------
    def take(self, numel: int, dtype: torch.dtype) -> torch.Tensor:
        """A 1-D buffer, reused in a fixed pattern (the CUDA caching allocator does this by itself)."""
        spare = self._spare.get((numel, dtype))
        if spare:
            return spare.pop()
        with torch.inference_mode(False):
            return torch.empty(numel, dtype=dtype, device=self.device)

    def give(self, buffer: torch.Tensor) -> None:
        if self.reduce_stream is None:
            self._spare.setdefault((buffer.numel(), buffer.dtype), []).append(buffer)

    def drop_spares(self) -> None:
        self._spare.clear()

    def reduce(self, grad: torch.Tensor, what: str) -> Reduction:
        """Sum `grad` (1-D, already divided by the number of ranks) over the ranks; each keeps its own slot."""
        channel = self.reduce_channel
        assert channel is not None
        channel.issued += 1
        nbytes = grad.numel() * grad.element_size()
        with self._on(self.reduce_stream):
            if self.size == 1:  # replicated parameters
                self.bytes_sent += 2 * nbytes * (self.world - 1) // self.world
                work = dist.all_reduce(grad, group=channel.group, async_op=True)
                return Reduction(self, grad, grad, self._track(channel, what, work, self.reduce_stream))
            self.bytes_sent += nbytes * (self.size - 1) // self.size
            if self.gloo:
                # Gloo's reduce-scatter sends the bytes of an all-reduce; all-to-all and a local sum send half.
                received = self.take(grad.numel(), grad.dtype)
                work = dist.all_to_all_single(received, grad, group=channel.group, async_op=True)
            else:
                received = torch.empty(grad.numel() // self.size, dtype=grad.dtype, device=grad.device)
                assert _reduce_scatter is not None
                work = _reduce_scatter(received, grad, group=channel.group, async_op=True)
            return Reduction(self, grad, received, self._track(channel, what, work, self.reduce_stream))

    def close(self) -> None:
        self.drop_spares()


@dataclass(eq=False)
class Reduction:
    """A gradient reduction in flight; ``finish`` returns this rank's slice of the sum as a new tensor."""

    collectives: Collectives
    grad: torch.Tensor
    received: torch.Tensor
    pending: Pending

    def done(self) -> bool:
        return self.pending.done()

    def finish(self) -> torch.Tensor:
        c = self.collectives
        self.pending.wait()
        if self.received is self.grad:  # all-reduce in place: the buffer itself is the result
            return self.grad
        if not c.gloo:
            return self.received
        chunks = self.received.view(c.size, -1)
        with torch.inference_mode(False), torch.no_grad():
            out = torch.add(chunks[0], chunks[1]) if c.size == 2 else chunks.sum(dim=0)
        c.give(self.grad)
        c.give(self.received)
        return out


def connect(group: Any, device: torch.device, *, shard: bool, timeout: float, single_communicator: bool) -> Collectives:
    """Collective over `group` at its first use. `group` None: one rank alone, no process group at all."""
    if group is None or dist.get_world_size(group) == 1:
        watch = Watch(0, 1, [0], timeout, "")
        return Collectives(device, 1, 0, 1, 0, watch, SingleComm())
    ranks = dist.get_process_group_ranks(group)
    rank, world = dist.get_rank(group), len(ranks)
    groups = groups_for(group, single_communicator, timeout)
    watch = Watch(rank, world, ranks, timeout, f"torch_shard/{groups.control.group_name}")
    channels = {n: Channel(n, groups) for n in ("gather", "reduce", "scalar", "control")}
    watch.channels = channels
    backend = dist.get_backend(group)
    side = device.type == "cuda" and "nccl" in backend
    logger.debug("collectives over ranks %s, backend %s", ranks, backend)
    return Collectives(
        device=device,
        world=world,
        world_rank=rank,
        size=world if shard else 1,
        rank=rank if shard else 0,
        watch=watch,
        scalar=ScalarComm(channels["scalar"], watch, world, rank) if shard else SingleComm(),
        gather_channel=channels["gather"],
        reduce_channel=channels["reduce"],
        control_channel=channels["control"],
        written=groups.written,
        gloo="nccl" not in backend,
        gather_stream=torch.cuda.Stream(device) if side else None,
        reduce_stream=torch.cuda.Stream(device) if side else None,
    )
