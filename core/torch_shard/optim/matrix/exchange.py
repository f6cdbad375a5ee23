"""Full matrices at their owners: one part of a step, from shards and back.

A *part* is what one group has in one unit (or in several small ones). On two ranks that own a matrix each::

    rank 0                              rank 1
    shard  [ A A A A B ]                shard  [ B B B C C ]      values; the gradients are sharded alike
           |       |                            |
           |       +---- shard of B ------->  full B               ``send``: values and gradients, one message
         full A                               full B               ``build``; the optimizer steps on them
           |       +<--- shard of B --------  |
    shard  [ A A A A B ]                shard  [ B B B C C ]      ``reply``, ``collect``: new values, one message

A rank sends about ``3 Psi / N`` bytes a step, for ``Psi`` bytes of parameters on ``N`` ranks: a value and a gradient for
each element that it holds and another one owns, and a value for each that it owns and another one holds. All sizes follow
from the layout, so the ranks need not tell them. Messages are bytes, because parameters may have several dtypes, and
because Gloo knows few dtypes. Each rank's chunk of a message is aligned.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

from ...comm.collectives import Collectives, outside_inference
from ...comm.streams import streams_of
from ...comm.work import Pending
from ...layout.flat_layout import ALIGNMENT, aligned
from ...numerics.stochastic_rounding import EXACT, round_to
from ...shard_tensor.tensor import ShardTensor
from ...unit.flat_buffer import FlatBuffer
from ...unit.module_params import copy_attributes


class Spares:
    """Memory for messages that is used again within a step: on the CPU new memory costs as much time as the copy into it.

    Memory is given back when its message has been waited for. There is never more of it than for the messages in flight:
    where none is large enough, one is dropped for the new one.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._spare: list[torch.Tensor] = []  # the smallest first

    def take(self, size: int) -> torch.Tensor:
        """Return `size` bytes, 1-D."""
        for i, memory in enumerate(self._spare):
            if size <= memory.numel():
                return self._spare.pop(i)[:size]
        if self._spare and size:
            self._spare.pop()
        with outside_inference():
            return torch.empty(size, dtype=torch.uint8, device=self.device)

    def give(self, memory: torch.Tensor) -> None:
        if not streams_of(self.device).exist and memory.numel():
            base = memory._base
            self._spare = sorted([*self._spare, memory if base is None else base], key=torch.Tensor.numel)

    def drop(self) -> None:
        self._spare = []


class Exchange:
    """A message to each rank and one from each, in flight. Collective."""

    def __init__(
        self,
        c: Collectives,
        spares: Spares,
        chunks: Sequence[torch.Tensor],
        sent_sizes: list[int],
        received_sizes: list[int],
        what: str,
    ) -> None:
        """Send the bytes of `chunks`. The sizes are those of the messages to each rank and from each, by rank."""
        self._spares = spares
        self._sent, self._received = spares.take(sum(sent_sizes)), spares.take(sum(received_sizes))
        if chunks:
            torch.cat(list(chunks), out=self._sent)
        self._pending: Pending = c.all_to_all(self._received, self._sent, received_sizes, sent_sizes, what)

    def finish(self) -> torch.Tensor:
        """Wait, and return what the ranks have sent, one after the other. :meth:`end` gives its memory back."""
        self._pending.wait()
        self._spares.give(self._sent)
        return self._received

    def end(self) -> None:
        """Give back the memory of what was received."""
        self._spares.give(self._received)


class OwnedParam:
    """A parameter that takes part in a step: its owner, and which of its elements, in memory order, each rank holds."""

    __slots__ = ("flat", "held", "itemsize", "owner", "param")

    def __init__(self, param: ShardTensor, flat: FlatBuffer, owner: int) -> None:
        self.param, self.flat, self.owner = param, flat, owner
        self.itemsize = param._local.element_size()
        index = param._spec.index
        self.held = {rank: flat.layout.owned(index, rank) for rank in flat.layout.owners(index)}

    @property
    def moves(self) -> bool:
        """True if another rank than the owner holds a part of the parameter."""
        return any(rank != self.owner for rank in self.held)

    def length(self, rank: int) -> int:
        start, stop = self.held.get(rank, (0, 0))
        return stop - start

    def shaped(self, memory: torch.Tensor) -> torch.Tensor:
        """Return 1-D memory of all elements in the parameter's shape and strides."""
        spec = self.param._spec
        return memory.as_strided(tuple(spec.shape), spec.stride, memory.storage_offset())


class FullParam:
    """A parameter that this rank owns, in full, as the optimizer gets it."""

    __slots__ = ("entry", "memory", "value")

    def __init__(self, entry: OwnedParam, memory: torch.Tensor, grad: torch.Tensor) -> None:
        """Take `memory` and `grad`, 1-D, with all elements. With stochastic rounding the optimizer gets copies in fp32."""
        self.entry = entry
        if entry.flat.rounding is not None:
            memory, grad = memory.to(EXACT), grad.to(EXACT)
        self.memory = memory
        with torch._C.DisableTorchFunctionSubclass():
            wants = entry.param.requires_grad
        self.value = torch.nn.Parameter(entry.shaped(memory), requires_grad=wants)
        copy_attributes(entry.param, self.value)
        self.value.grad = entry.shaped(grad)

    def store(self) -> None:
        """Bring the new values to :attr:`memory`, in the dtype of storage: the shard itself, or what is sent back."""
        e = self.entry
        own = e.shaped(self.memory)
        if self.value.data_ptr() != own.data_ptr() or self.value.stride() != own.stride():  # after `p.data = ...`
            own.copy_(self.value)
        if e.flat.rounding is not None:
            stored = torch.empty_like(self.memory, dtype=e.param._local.dtype) if e.moves else e.param._local
            round_to([stored], self.memory, [e.flat.rounding.at(e.flat.layout.slots[e.param._spec.index].offset)])
            self.memory = stored
        if e.moves:
            # What is written from now on would be lost: torch refuses to write to expanded tensors.
            self.value.data = self.value.new_full((), torch.nan).expand(self.value.shape)
            self.value.grad = None


class Part:
    """The parameters that are exchanged at once. Parts are made anew when gradients come or go."""

    def __init__(self, entries: Sequence[OwnedParam], collectives: Collectives, spares: Spares, text: str) -> None:
        self.entries, self.c, self.spares, self.text = list(entries), collectives, spares, text
        me = collectives.rank
        self.owned = [entry for entry in entries if entry.owner == me]
        # Large items first: then each segment of a message is aligned for its dtype.
        ordered = sorted((e for e in entries if e.moves), key=lambda e: -e.itemsize)
        ranks = range(collectives.size)
        self._to = [[e for e in ordered if e.owner == rank and rank != me and e.length(me)] for rank in ranks]
        self._from = [[e for e in ordered if e.owner == me and rank != me and e.length(rank)] for rank in ranks]
        # Bytes to and from each rank, with values and gradients on the way to the owners, and values and a flag on the way back.
        held_here = [_bytes(to, me) for to in self._to]
        held_there = [_bytes(own, rank) for rank, own in enumerate(self._from)]
        self._sizes_to, self._sizes_from = ([aligned(2 * n) for n in sizes] for sizes in (held_here, held_there))
        self._back_to, self._back_from = (
            [aligned(n) + ALIGNMENT * (rank != me) for rank, n in enumerate(sizes)] for sizes in (held_there, held_here)
        )
        self.fulls: list[FullParam] = []
        self._coming: Exchange | None = None
        self._returning: Exchange | None = None

    # -- to the owners ------------------------------------------------------------------------------------------
    def send(self) -> None:
        """Start sending shards of values and gradients to the owners. Collective."""
        if self.c.size == 1:
            return
        chunks: list[torch.Tensor] = []
        for to, size in zip(self._to, self._sizes_to, strict=True):
            shards = [t for e in to for t in (e.param._local, e.param.grad._local)]
            chunks += self._filled(shards, size)
        what = f"{self.text}: shards to the owners"
        self._coming = Exchange(self.c, self.spares, chunks, self._sizes_to, self._sizes_from, what)

    def build(self) -> list[torch.Tensor]:
        """Wait for the shards, and return the parameters that this rank owns: plain tensors with their gradients."""
        pieces: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        if self._coming is not None:
            chunks = self._coming.finish().split(self._sizes_from)
            for rank, (own, chunk) in enumerate(zip(self._from, chunks, strict=True)):
                end = 0
                for e in own:
                    value, end = _segment(chunk, end, e.length(rank), e)
                    grad, end = _segment(chunk, end, e.length(rank), e)
                    pieces[id(e), rank] = value, grad
        self.fulls = [self._full(e, pieces) for e in self.owned]
        if self._coming is not None:
            self._coming.end()
            self._coming = None
        return [full.value for full in self.fulls]

    def _full(self, e: OwnedParam, pieces: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]]) -> FullParam:
        local: torch.Tensor = e.param._local
        grad: torch.Tensor = e.param.grad._local
        if not e.moves:
            return FullParam(e, local, grad)  # all of it is here: the optimizer steps on the shard itself
        pairs = [pieces.get((id(e), rank), (local, grad)) for rank in e.held]  # a rank's own shards are not sent
        return FullParam(e, torch.cat([value for value, _ in pairs]), torch.cat([g for _, g in pairs]))

    # -- and back -----------------------------------------------------------------------------------------------
    def reply(self, left: bool) -> None:
        """Start sending the new values to the ranks that hold shards of them. Collective.

        `left` is sent, too: whether this rank has left its step early.
        """
        for full in self.fulls:
            full.store()
        if self.c.size == 1:
            self.fulls = []
            return
        memory = {id(full.entry): full.memory for full in self.fulls}
        chunks: list[torch.Tensor] = []
        for rank, (own, size) in enumerate(zip(self._from, self._back_to, strict=True)):
            if not size:
                continue
            chunks += self._filled([memory[id(e)][slice(*e.held[rank])] for e in own], size - ALIGNMENT)
            chunks.append(torch.full((ALIGNMENT,), left, dtype=torch.uint8, device=self.c.device))
        what = f"{self.text}: new values"
        self._returning = Exchange(self.c, self.spares, chunks, self._back_to, self._back_from, what)
        me = self.c.rank
        _copy([(e.param._local, memory[id(e)][slice(*e.held[me])]) for e in self.owned if e.moves and e.length(me)])
        self.fulls = []

    def collect(self) -> dict[int, torch.Tensor]:
        """Wait for the new values, and write them to the shards.

        Returns:
            By rank, whether it has left its step early (a 1-element tensor).
        """
        if self._returning is None:
            return {}
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        left: dict[int, torch.Tensor] = {}
        chunks = self._returning.finish().split(self._back_from)
        for rank, (to, chunk) in enumerate(zip(self._to, chunks, strict=True)):
            end = 0
            for e in to:
                value, end = _segment(chunk, end, e.length(self.c.rank), e)
                pairs.append((e.param._local, value))
            if chunk.numel():
                left[rank] = chunk[-1:].clone()
        _copy(pairs)
        self._returning.end()
        self._returning = None
        return left

    def in_flight(self) -> Iterator[Exchange]:
        """Yield exchanges that have not been waited for, and forget them."""
        for exchange in (self._coming, self._returning):
            if exchange is not None:
                yield exchange
        self._coming = self._returning = None
        self.fulls = []

    # -- messages -----------------------------------------------------------------------------------------------
    def _filled(self, tensors: Iterable[torch.Tensor], size: int) -> list[torch.Tensor]:
        """Return the bytes of `tensors`, padded to `size`."""
        parts = [t.view(torch.uint8) for t in tensors]
        lacking = size - sum(t.numel() for t in parts)
        return [*parts, torch.zeros(lacking, dtype=torch.uint8, device=self.c.device)] if lacking else parts


def _segment(chunk: torch.Tensor, at: int, length: int, e: OwnedParam) -> tuple[torch.Tensor, int]:
    """Return `length` elements of a rank's chunk that begin at byte `at`, and the byte at which they end."""
    end = at + length * e.itemsize
    return chunk[at:end].view(e.param._local.dtype), end


def _copy(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    if pairs:
        shards, values = zip(*pairs, strict=True)
        torch._foreach_copy_(shards, values)


def _bytes(entries: Iterable[OwnedParam], rank: int) -> int:
    """Return the bytes of the parameters' values that `rank` holds."""
    return sum(e.length(rank) * e.itemsize for e in entries)
