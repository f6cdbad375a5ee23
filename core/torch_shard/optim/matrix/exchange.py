"""Whole matrices at their owners: one part of a step, from slices and back.

A *part* is what one group has in one unit (or in several small ones). Its way, on two ranks that own a matrix each::

    rank 0                              rank 1
    shard  [ A A A A B ]                shard  [ B B B C C ]      values; the gradients are cut alike
           |       |                            |
           |       +---- B's slices ------->  B whole              ``send``: values and gradients, one message
         A whole                              B whole              ``build``; the optimizer steps on them
           |       +<--- B's slice ---------  |
    shard  [ A A A A B ]                shard  [ B B B C C ]      ``reply``, ``collect``: new values, one message

A rank sends about ``3 Psi / N`` bytes a step, for ``Psi`` bytes of parameters on ``N`` ranks: a value and a gradient for
each element that it holds and another one owns, and a value for each that it owns and another one holds. All sizes follow
from the layout, so the ranks need not tell them. Messages are bytes, because parameters may have several dtypes, and
because Gloo knows few.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch

from ...comm.collectives import Collectives, outside_inference
from ...comm.work import Pending
from ...numerics.stochastic_rounding import EXACT, round_to
from ...shard_tensor.tensor import ShardTensor
from ...unit.flat_buffer import FlatBuffer
from ...unit.module_params import copy_attributes

__all__ = ["Entry", "Part", "Spares"]

_ALIGN = 16  # bytes; each rank's chunk of a message begins at a multiple


class Spares:
    """Memory for messages, used again and again within a step: on the CPU new memory costs as much time as the copy into it.
    It comes back when its message has been waited for. There are never more of them than messages at a time: where none is
    large enough, one is let go for the new one."""

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
        if self.device.type == "cpu" and memory.numel():
            base = memory._base
            self._spare = sorted([*self._spare, memory if base is None else base], key=torch.Tensor.numel)

    def drop(self) -> None:
        self._spare = []


class Exchange:
    """A message to each rank and one from each, in flight. Collective."""

    def __init__(
        self, c: Collectives, spares: Spares, chunks: Sequence[torch.Tensor], to: list[int], come: list[int], what: str
    ) -> None:
        self._spares = spares
        self._sent, self._received = spares.take(sum(to)), spares.take(sum(come))
        if chunks:
            torch.cat(list(chunks), out=self._sent)
        self._pending: Pending = c.all_to_all(self._received, self._sent, come, to, what)

    def finish(self) -> torch.Tensor:
        """Return what the ranks have sent, one after the other; given back with :meth:`end`."""
        self._pending.wait()
        self._spares.give(self._sent)
        return self._received

    def end(self) -> None:
        """Give back the memory of what has come."""
        self._spares.give(self._received)


class Entry:
    """A parameter that takes part: who owns it, and which of its elements, in memory order, each rank holds."""

    __slots__ = ("flat", "held", "itemsize", "mine", "name", "numel", "owner", "param")

    def __init__(self, param: ShardTensor, flat: FlatBuffer, owner: int) -> None:
        self.param, self.flat, self.owner = param, flat, owner
        spec = param._spec
        self.name, self.numel = spec.name, spec.numel
        self.itemsize = param._local.element_size()
        ranks = flat.layout.owners(spec.index)
        self.held = {rank: flat.layout.owned(spec.index, rank) for rank in ranks}
        self.mine = (spec.start, spec.stop)

    @property
    def moves(self) -> bool:
        """True if another rank than the owner holds something of the parameter."""
        return any(rank != self.owner for rank in self.held)

    def length(self, rank: int) -> int:
        start, stop = self.held.get(rank, (0, 0))
        return stop - start

    def shaped(self, memory: torch.Tensor) -> torch.Tensor:
        """Return 1-D memory of all elements in the parameter's shape and strides."""
        spec = self.param._spec
        return memory.as_strided(tuple(spec.shape), spec.stride, memory.storage_offset())


class Whole:
    """A parameter that this rank owns, as the optimizer gets it."""

    __slots__ = ("_version", "entry", "grad", "memory", "rounds", "value")

    def __init__(self, entry: Entry, memory: torch.Tensor, grad: torch.Tensor) -> None:
        self.entry, self.rounds = entry, entry.flat.rounding is not None  # True: on copies in fp32
        if self.rounds:
            memory, grad = memory.to(EXACT), grad.to(EXACT)
        self.memory = memory
        with torch._C.DisableTorchFunctionSubclass():
            wants = entry.param.requires_grad
        self.value = torch.nn.Parameter(entry.shaped(memory), requires_grad=wants)
        copy_attributes(entry.param, self.value)
        self.grad = self.value.grad = entry.shaped(grad)
        self._version = self.grad._version

    def settle(self) -> None:
        """Bring values back where the optimizer has given the tensor other memory (``p.data = ...``)."""
        own = self.entry.shaped(self.memory)
        if self.value.data_ptr() != own.data_ptr() or self.value.stride() != own.stride():
            own.copy_(self.value)

    def settle_gradient(self) -> bool:
        """Return True if the optimizer has changed the gradient (there is one) where the user's must be changed, too."""
        given: Any = self.value.grad
        changed = given is not self.grad or given._version != self._version
        if self.entry.moves:
            return changed
        if given is not self.grad or (self.rounds and changed):
            grad: Any = self.entry.param.grad
            self.entry.shaped(grad._local).copy_(given)  # the user's own
        return False

    def store(self) -> None:
        """Round the new values to the dtype of storage, in the shard where nothing moves."""
        e = self.entry
        if not self.rounds:
            return
        assert e.flat.rounding is not None
        stored = torch.empty_like(self.memory, dtype=e.param._local.dtype) if e.moves else e.param._local
        round_to([stored], self.memory, [e.flat.rounding.at(e.flat.layout.slots[e.param._spec.index].offset)])
        self.memory = stored


class Part:
    """What is exchanged at once; made anew when gradients come or go."""

    def __init__(self, entries: Sequence[Entry], collectives: Collectives, spares: Spares, text: str) -> None:
        self.entries, self.c, self.spares, self.text = list(entries), collectives, spares, text
        me = collectives.rank
        self.owned = [entry for entry in entries if entry.owner == me]
        # Large items first: then each segment of a message is aligned for its dtype.
        ordered = sorted((e for e in entries if e.moves), key=lambda e: -e.itemsize)
        ranks = range(collectives.size)
        self._to = [[e for e in ordered if e.owner == rank and rank != me and e.length(me)] for rank in ranks]
        self._from = [[e for e in ordered if e.owner == me and rank != me and e.length(rank)] for rank in ranks]
        self._sizes_to = [_padded(sum(2 * e.length(me) * e.itemsize for e in to)) for to in self._to]
        self._sizes_from = [
            _padded(sum(2 * e.length(rank) * e.itemsize for e in own)) for rank, own in enumerate(self._from)
        ]
        self._back_to = [
            _padded(sum(e.length(rank) * e.itemsize for e in own)) + _ALIGN * (rank != me)
            for rank, own in enumerate(self._from)
        ]
        self._back_from = [
            _padded(sum(e.length(me) * e.itemsize for e in to)) + _ALIGN * (rank != me)
            for rank, to in enumerate(self._to)
        ]
        self.wholes: list[Whole] = []
        self._coming: Exchange | None = None
        self._returning: Exchange | None = None

    # -- to the owners ------------------------------------------------------------------------------------------
    def send(self) -> None:
        """Start sending slices of values and gradients to the owners. Collective."""
        if self.c.size == 1:
            return
        chunks: list[torch.Tensor] = []
        for to, size in zip(self._to, self._sizes_to, strict=True):
            slices = [t for e in to for t in (e.param._local, e.param.grad._local)]
            chunks += self._filled(slices, size)
        what = f"{self.text}: slices to their owners"
        self._coming = Exchange(self.c, self.spares, chunks, self._sizes_to, self._sizes_from, what)

    def build(self) -> list[torch.Tensor]:
        """Wait for the slices; returns what this rank owns: plain tensors with their gradients."""
        pieces: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]] = {}
        if self._coming is not None:
            received = self._coming.finish()
            at = 0
            for rank, (own, size) in enumerate(zip(self._from, self._sizes_from, strict=True)):
                end = at
                for e in own:
                    value, end = _segment(received, end, e.length(rank), e)
                    grad, end = _segment(received, end, e.length(rank), e)
                    pieces[id(e), rank] = value, grad
                at += size
        self.wholes = [self._whole(e, pieces) for e in self.owned]
        if self._coming is not None:
            self._coming.end()
            self._coming = None
        return [whole.value for whole in self.wholes]

    def _whole(self, e: Entry, pieces: dict[tuple[int, int], tuple[torch.Tensor, torch.Tensor]]) -> Whole:
        local: torch.Tensor = e.param._local
        grad: torch.Tensor = e.param.grad._local
        if not e.moves:
            return Whole(e, local, grad)  # all of it is here: the optimizer steps on the shard itself
        pairs = [pieces.get((id(e), rank), (local, grad)) for rank in e.held]  # a rank's own slices are not sent
        return Whole(e, torch.cat([value for value, _ in pairs]), torch.cat([g for _, g in pairs]))

    # -- and back -----------------------------------------------------------------------------------------------
    def reply(self, left: bool) -> None:
        """Start sending the new values to those that hold slices of them; `left`: together with the word that this rank's
        step has ended early. Collective."""
        for whole in self.wholes:
            whole.store()
        if self.c.size == 1:
            self.wholes = []
            return
        memory = {id(whole.entry): whole.memory for whole in self.wholes}
        chunks: list[torch.Tensor] = []
        for rank, (own, size) in enumerate(zip(self._from, self._back_to, strict=True)):
            if not size:
                continue
            chunks += self._filled([memory[id(e)][slice(*e.held[rank])] for e in own], size - _ALIGN)
            chunks.append(torch.full((_ALIGN,), left, dtype=torch.uint8, device=self.c.device))
        what = f"{self.text}: new values"
        self._returning = Exchange(self.c, self.spares, chunks, self._back_to, self._back_from, what)
        mine = [
            (e.param._local, memory[id(e)][slice(*e.mine)]) for e in self.owned if e.moves and e.length(self.c.rank)
        ]
        _copy(mine)
        self.wholes = []

    def collect(self) -> dict[int, torch.Tensor]:
        """Wait for the new values, and write them to the shards. Returns, by rank, whether it left (a 1-element tensor)."""
        if self._returning is None:
            return {}
        received = self._returning.finish()
        pairs: list[tuple[torch.Tensor, torch.Tensor]] = []
        left: dict[int, torch.Tensor] = {}
        at = 0
        for rank, (to, size) in enumerate(zip(self._to, self._back_from, strict=True)):
            end = at
            for e in to:
                value, end = _segment(received, end, e.length(self.c.rank), e)
                pairs.append((e.param._local, value))
            at += size
            if size:
                left[rank] = received[at - 1 : at].clone()
        _copy(pairs)
        self._returning.end()
        self._returning = None
        return left

    def under_way(self) -> Iterator[Exchange]:
        """Yield exchanges that nobody has waited for, and forget them."""
        for exchange in (self._coming, self._returning):
            if exchange is not None:
                yield exchange
        self._coming = self._returning = None
        self.wholes = []

    # -- messages -----------------------------------------------------------------------------------------------
    def _filled(self, slices: Iterable[torch.Tensor], size: int) -> list[torch.Tensor]:
        """Return the bytes of `slices`, and what lacks of `size`."""
        parts = [t.view(torch.uint8) for t in slices]
        lacking = size - sum(t.numel() for t in parts)
        return [*parts, torch.zeros(lacking, dtype=torch.uint8, device=self.c.device)] if lacking else parts


def _segment(message: torch.Tensor, at: int, length: int, e: Entry) -> tuple[torch.Tensor, int]:
    """Return `length` elements of a message, from byte `at`, and where they end."""
    end = at + length * e.itemsize
    return message[at:end].view(e.param._local.dtype), end


def _copy(pairs: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    by_dtype: dict[torch.dtype, tuple[list[Any], list[Any]]] = {}
    for into, value in pairs:
        lists = by_dtype.setdefault(into.dtype, ([], []))
        lists[0].append(into)
        lists[1].append(value)
    for intos, values in by_dtype.values():
        torch._foreach_copy_(intos, values)


def _padded(size: int) -> int:
    return -(-size // _ALIGN) * _ALIGN
