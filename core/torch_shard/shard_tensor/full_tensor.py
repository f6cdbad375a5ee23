"""Full copies of ShardTensors, and functions that run on such copies.

A function that makes new memory (a matrix product, ``torch.cat``, a sum over one dimension) runs on full copies where shards
don't suffice. The copies are dropped afterwards, so that a function which returns a view of a copy, or edits one, is an error.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from ..comm.streams import streams_of
from ..errors import DivergenceError
from ..layout.flat_layout import FlatLayout, ParamMeta, aligned
from ..layout.tensor_part import dense_stride
from ..utils.pytree import storage_of, tensors_in
from .function_call import FunctionCall
from .function_sets import INDEXED_EDITS
from .spec import ShardSpec, boxes_in, gather_error, refuse_unreduced
from .tensor import ShardTensor
from .views import stands_alone


def full_tensors(tensors: Sequence[ShardTensor], what: str) -> list[torch.Tensor]:
    """Return each tensor unsharded: plain, with the original shape and strides, without gradient. Collective.

    A gradient whose reduction ``no_sync()`` defers is the rank's own, and is not sent. All other tensors that share ranks and
    device travel in one message from each rank, as bytes, whatever their dtypes are. The bytes count as sent.

    Args:
        tensors: the tensors, the same on all ranks.
        what: the operation, for messages.

    Raises:
        DivergenceError: another rank gathers something else; found on the CPU only.
        NeedsGatherError: a tensor was computed from a gradient whose reduction ``no_sync()`` defers.
    """
    results: list[Any] = list(map(own_gradient, tensors))
    refuse_unreduced([t for t, own in zip(tensors, results, strict=True) if own is None], what)
    groups: dict[Any, list[int]] = {}
    with torch.no_grad():
        for i, t in enumerate(tensors):
            if results[i] is not None:
                continue
            spec, local = t._spec, t._local
            results[i] = torch.empty_strided(spec.shape, spec.stride, dtype=local.dtype, device=local.device)
            if spec.numel:
                groups.setdefault((id(spec.comm), local.device), []).append(i)
        for members in groups.values():
            _gather([tensors[i] for i in members], [results[i] for i in members], what)
    return results


def own_gradient(tensor: ShardTensor) -> torch.Tensor | None:
    """Return a copy of this rank's own gradient, if `tensor` shows one whose reduction is deferred. Not collective."""
    read = tensor._shard_state.read_own
    return None if read is None else read()


def _gather(tensors: Sequence[ShardTensor], fulls: Sequence[torch.Tensor], what: str) -> None:
    """Fill `fulls` with all ranks' shards of `tensors`: each rank broadcasts what it has."""
    # An all-gather would send from each rank, and need memory for, as much as the rank with the most has. But the shards of
    # one parameter lie on few of many ranks.
    comm, device = tensors[0]._spec.comm, tensors[0]._local.device
    cuts = _cuts(tensors, what)
    for rank in range(comm.size):
        sizes = [cut[rank].length * t._local.element_size() for t, cut in zip(tensors, cuts, strict=True)]
        padded = list(map(aligned, sizes))  # for every dtype
        row = torch.empty(sum(padded), dtype=torch.uint8, device=device)
        parts = zip(row.split(padded), sizes, tensors, strict=True)
        places = [part[:size].view(t._local.dtype) for part, size, t in parts]
        if rank == comm.rank:
            comm.bytes_sent += (comm.size - 1) * row.numel()
            for place, t in zip(places, tensors, strict=True):
                place.copy_(t._local.detach())
        if row.numel():
            comm.broadcast(row, rank, what)
        for t, full, cut, place in zip(tensors, fulls, cuts, places, strict=True):
            cut[rank].fill(full, place, t._spec)


class _Cut(NamedTuple):
    """The elements that one rank has of a tensor: ``[start, stop)`` in memory order.

    Where tensor parallelism cuts the tensor, the elements are counted within the rank's part, which is the range of `size`
    from `offset` on in dimension `dim`.
    """

    start: int
    stop: int
    dim: int | None = None
    offset: int = 0
    size: int = 0

    @property
    def length(self) -> int:
        return self.stop - self.start

    def fill(self, full: torch.Tensor, values: torch.Tensor, spec: ShardSpec) -> None:
        """Put the rank's `values`, 1-D, into the full tensor."""
        if self.dim is None:
            full.as_strided((spec.numel,), (1,))[self.start : self.stop] = values
            return
        part = full.narrow(self.dim, self.offset, self.size)
        meta = ParamMeta(spec.name, tuple(part.shape), dense_stride(tuple(part.shape), spec.stride))
        layout = FlatLayout.build([meta], values.element_size(), 1)
        for box, place in boxes_in(values, layout.slots[0].order, layout.boxes(0, self.start, self.stop)):
            part[tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))] = place


def _cuts(tensors: Sequence[ShardTensor], what: str) -> list[list[_Cut]]:
    """Return the ranges of each tensor that the ranks have. Collective.

    Raises:
        DivergenceError: another rank gathers something else; found on the CPU only.
    """
    comm, device = tensors[0]._spec.comm, tensors[0]._local.device
    # Without the key, ranks that gather different things of equal size would not notice.
    key = zlib.crc32(repr([(what, t._spec.name, t._spec.shape, t._local.dtype) for t in tensors]).encode())
    message = [[key] * 5]
    for t in tensors:
        if (part := t._spec.part) is not None:  # other ranks' shards don't follow from this rank's layout
            message.append([t._spec.start, t._spec.stop, part.dim, part.offsets[part.dim], part.sizes[part.dim]])
    messages: Iterator[list[list[int]]] = iter(())
    on_host = not streams_of(device).exist
    if len(message) > 1 or on_host:  # on a GPU the host would have to wait for the keys
        gathered = comm.all_gather(torch.tensor(message, device=device), what)
        if on_host and set(gathered[:, 0].flatten().tolist()) != {key}:
            raise DivergenceError(
                f"rank {comm.world_rank}: {what} met another operation of other ranks. It is collective: call it on all "
                "ranks, in one order."
            )
        messages = iter(gathered[:, 1:].transpose(0, 1).tolist())
    return [
        [_Cut(*t._spec.layout.owned(t._spec.index, rank)) for rank in range(comm.size)]
        if t._spec.part is None
        else [_Cut(*values) for values in next(messages)]
        for t in tensors
    ]


# -- functions on full copies -----------------------------------------------------------------------------------------


def to_gather(call: FunctionCall) -> list[ShardTensor]:
    """Return the operands of which a function may be given full copies; none if it may not run on copies.

    What the function writes to is never copied, because an edit of a copy would be lost. Where deferred gradients are among the
    operands, these are all that are copied: each rank has its own.
    """
    target = call.target
    if call.name.startswith("as_strided"):  # its arguments are places in the tensor's own memory
        return []
    if isinstance(target, (list, tuple)) and any(isinstance(t, ShardTensor) for t in target):
        return []
    found = [t for t in call.sharded if t is not target]
    if (deferred := [t for t in found if t._shard_state.read_own is not None]) and not isinstance(target, ShardTensor):
        return deferred
    return found if all(map(stands_alone, found)) else []


def on_copies(call: FunctionCall, sharded: Sequence[ShardTensor], copies: Sequence[torch.Tensor]) -> Any:
    """Run a function with full `copies`, no inference tensors, in place of `sharded` among its operands.

    Raises:
        NeedsGatherError: the result is a view of a copy, or a copy was edited.
    """
    versions = [copy._version for copy in copies]
    result = call.run(sharded, copies)
    storages = set(map(storage_of, copies))
    if [copy._version for copy in copies] != versions or any(storage_of(t) in storages for t in tensors_in(result)):
        why = (
            "gives a view with gaps in memory or edits in place. It would do so on a temporary full copy, and the edit would be "
            "lost; read .full_tensor() instead"
        )
        raise gather_error(sharded, call.name, why)
    return result


def edit_in_full(call: FunctionCall) -> bool:
    """Run an edit of some elements of a gradient or of optimizer state on its full values, and return True. Collective.

    Each rank keeps its shard of the result. Returns False, on all ranks, for other calls.
    """
    target, sharded = call.target, call.sharded
    if call.name not in INDEXED_EDITS or not isinstance(target, ShardTensor) or not all(map(stands_alone, sharded)):
        return False
    if torch.is_grad_enabled() and any(t.requires_grad for t in call.tensors):
        return False  # it would be recorded
    copies = full_tensors(sharded, f"{call.name} of the sharded {target._spec.name}")
    with torch.no_grad():
        call.run(sharded, copies)
        target.copy_(copies[[t is target for t in sharded].index(True)])
    return True
