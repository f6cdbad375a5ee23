"""The memory of a simulated device and its host: who has read and written which bytes, and when memory is given away again."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from .clocks import Access, Agent, unordered

HOST, PINNED, DEVICE = "host", "page-locked", "device"
ENOUGH = 20  # races, after which no more are looked for


@dataclass
class Span:
    """Bytes of one allocation with one history: the last write, and the reads since then."""

    start: int
    stop: int
    write: Access | None = None
    reads: dict[Agent, Access] = field(default_factory=dict)

    def cut(self, at: int) -> Span:
        """Give the bytes from `at` on to a new span, and return that."""
        rest = Span(at, self.stop, self.write, dict(self.reads))
        self.stop = at
        return rest

    def accesses(self) -> Iterator[Access]:
        if self.write is not None:
            yield self.write
        yield from self.reads.values()


@dataclass(eq=False)
class Allocation:
    """What one storage holds now.

    Attributes:
        kind: of which memory it is.
        owner: the stream on which device memory was allocated, and to whose pool it goes back; None for host memory.
        before: earlier accesses to what may be the same memory, which were not ordered before the owner when it was freed.
        pool: the allocator's pool that it is from; None for the usual one.
        recorded: streams past which the allocator keeps it when it is freed (``record_stream``).
        made: where, for messages.
    """

    kind: str
    owner: Agent | None
    pool: Any = None
    before: list[Access] = field(default_factory=list)
    spans: list[Span] = field(default_factory=list)
    recorded: set[Agent] = field(default_factory=set)
    made: str = ""

    def over(self, start: int, stop: int) -> list[Span]:
        """Return spans that are just the bytes from `start` to `stop`."""
        found, at = [], start
        for index in range(len(self.spans) - 1, -1, -1):
            span = self.spans[index]
            if span.start < start < span.stop:
                self.spans.insert(index + 1, span.cut(start))
            elif span.start < stop < span.stop:
                self.spans.insert(index + 1, span.cut(stop))
                if span.start < start:
                    self.spans.insert(index + 1, span.cut(start))
        self.spans.sort(key=lambda span: span.start)
        for span in list(self.spans):
            if span.stop <= start or span.start >= stop:
                continue
            if span.start > at:
                found.append(self._new(at, span.start))
            found.append(span)
            at = span.stop
        if at < stop:
            found.append(self._new(at, stop))
        return found

    def _new(self, start: int, stop: int) -> Span:
        self.spans.append(Span(start, stop))
        return self.spans[-1]


class Memory:
    """The allocations of one rank, and the accesses that nothing orders.

    The caching allocator is modelled: what is freed goes back to the pool of the stream that it was allocated on, whoever still
    uses it. Any later allocation of that stream may get it, so each inherits all accesses of the pool that the stream does not
    know of.

    Attributes:
        races: what was found, one text for each pair of places in the code.
    """

    def __init__(self, hosts: Sequence[Agent], pool: Callable[[], Any]) -> None:
        """Make a memory without allocations.

        Args:
            hosts: the agents of all threads so far.
            pool: returns the pool that the present thread allocates from.
        """
        self._hosts, self._pool = hosts, pool
        self._allocations: dict[int, Allocation] = {}  # by the address of the storage's C++ object
        # By owner and pool: of each agent the latest access.
        self._pools: dict[tuple[Agent, Any], dict[Agent, Access]] = {}
        self.races: dict[tuple[str, str], str] = {}

    # -- allocations ----------------------------------------------------------------------------------------------
    def of(self, tensor: torch.Tensor) -> Allocation | None:
        """Return the allocation of a tensor's storage, None if it was never seen."""
        return self._allocations.get(tensor.untyped_storage()._cdata)

    def kind(self, tensor: torch.Tensor) -> str:
        """Return of which memory a tensor is. What was made before the simulation is the device's."""
        found = self.of(tensor)
        return DEVICE if found is None else found.kind

    def allocate(self, storage: Any, kind: str, owner: Agent | None, made: str = "") -> Allocation:
        """Note that `storage` has new memory; `made` says where, for messages."""
        key = storage._cdata
        if key not in self._allocations:
            # The storage's Python object lives as long as the C++ object.
            weakref.finalize(storage, self._gone, key).atexit = False
        found = Allocation(kind, owner if kind == DEVICE else None, self._pool(), made=made)
        if found.owner is not None:
            pool = found.owner, found.pool
            found.before = unordered(self._pools.get(pool, {}).values(), found.owner)
            self._pools[pool] = {access.agent: access for access in found.before}
        self._allocations[key] = found
        return found

    def free(self, storage: Any) -> str:
        """Note that the memory of `storage`, which lives on, was given back; return of which kind it was."""
        found = self._allocations.get(storage._cdata)
        if found is None:
            return DEVICE
        self._give_back(found)
        return found.kind

    def _gone(self, key: int) -> None:
        found = self._allocations.pop(key, None)
        if found is not None:
            self._give_back(found)

    def _give_back(self, allocation: Allocation) -> None:
        spans, allocation.spans = allocation.spans, []
        if allocation.owner is None:
            return
        pool = self._pools.setdefault((allocation.owner, allocation.pool), {})
        for access in (*allocation.before, *(access for span in spans for access in span.accesses())):
            if any(access.before(stream) for stream in allocation.recorded):
                continue  # the allocator records an event on each of these streams now, and gives the memory away behind it
            latest = pool.get(access.agent)
            # What a thread of the host has waited for has ended, whichever thread frees the memory.
            if any(map(access.before, self._hosts)):
                continue
            if latest is None or latest.epoch < access.epoch:
                pool[access.agent] = access

    # -- accesses -------------------------------------------------------------------------------------------------
    def access(self, agent: Agent, epoch: int, tensor: torch.Tensor, what: str, writes: bool) -> None:
        """Note that an operation of `agent` reads or writes a tensor; find accesses that nothing orders before it."""
        if not tensor.numel() or len(self.races) >= ENOUGH:
            return
        allocation = self.of(tensor)
        if allocation is None:
            allocation = self.allocate(tensor.untyped_storage(), DEVICE, agent)
        new = Access(agent, epoch, what)
        for old in unordered(allocation.before, agent):
            self._report(old, new, "memory that was freed, and may have been allocated anew, is still used by")
        for start, stop in ranges(tensor):
            for span in allocation.over(start, stop):
                if span.write is not None and not span.write.before(agent):
                    self._report(
                        span.write, new, f"{'a write' if writes else 'a read'} is not ordered behind the write by"
                    )
                if not writes:
                    span.reads[agent] = new
                    continue
                for read in unordered(span.reads.values(), agent):
                    self._report(read, new, "a write is not ordered behind the read by")
                span.write, span.reads = new, {}

    def _report(self, old: Access, new: Access, how: str) -> None:
        self.races.setdefault((old.what, new.what), f"{new}: {how} {old}")


def ranges(tensor: torch.Tensor) -> list[tuple[int, int]]:
    """Return the bytes of its storage that a tensor covers, as ranges."""
    size = tensor.element_size()
    dims = sorted(
        (
            (stride, length)
            for stride, length in zip(tensor.stride(), tensor.shape, strict=True)
            if length > 1 and stride
        ),
    )
    run, first = 1, tensor.storage_offset()
    while dims and dims[0][0] == run:
        run *= dims.pop(0)[1]
    starts = [first]
    for stride, length in dims:
        if len(starts) * length > 512:  # too many to tell apart: all that is between them
            last = first + sum((n - 1) * s for s, n in zip(tensor.stride(), tensor.shape, strict=True)) + 1
            return [(first * size, last * size)]
        starts = [start + stride * i for start in starts for i in range(length)]
    return [(start * size, (start + run) * size) for start in starts]
