"""Full copies of ShardTensors, and functions of gradients and optimizer state that need them.

A function that makes new memory (a matrix product, ``torch.cat``, a sum over one dimension) runs on full copies where shards
don't suffice. The copies are dropped afterwards, so that a function which returns a view of a copy, or edits one, is an error.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..comm.small_collectives import ScalarComm
from ..errors import DivergenceError
from ..layout.flat_layout import FlatLayout, ParamMeta
from ..layout.tensor_part import TensorPart, dense_stride
from ..utils.pytree import tensors_in
from .spec import ShardSpec, boxes_in, gather_error
from .unsharded_param import memory_of
from .views import stands_alone

if TYPE_CHECKING:
    from .tensor import ShardTensor

__all__ = ["full_tensors", "on_copies", "substituted", "to_gather"]

_KEY = 16  # bytes before a rank's values that identify what it gathers
_SMALL = 1 << 16  # bytes below which the size of a message does not matter
_BROADCASTS = 4  # up to so many senders broadcast, as in comm.collectives


def full_tensors(tensors: Sequence[ShardTensor], what: str) -> list[torch.Tensor]:
    """Return each tensor unsharded: plain, with the original shape and strides, without gradient. Collective.

    All tensors that share ranks and device travel in one message, as bytes, whatever their dtypes are. The bytes count as
    sent.

    Args:
        tensors: the tensors, the same on all ranks.
        what: for messages.

    Raises:
        DivergenceError: another rank gathers something else; found on the CPU only.
    """
    results: list[Any] = [None] * len(tensors)
    groups: dict[Any, list[int]] = {}
    with torch.no_grad():
        for i, t in enumerate(tensors):
            spec, local = t._spec, t._local
            if spec.numel == 0:
                results[i] = torch.empty_strided(spec.shape, spec.stride, dtype=local.dtype, device=local.device)
            else:
                groups.setdefault((id(spec.comm), local.device), []).append(i)
        for members in groups.values():
            fulls = _gathered([tensors[i] for i in members], what)
            for i, full in zip(members, fulls, strict=True):
                results[i] = full
    return results


def _gathered(tensors: Sequence[ShardTensor], what: str) -> list[torch.Tensor]:
    comm, device = tensors[0]._spec.comm, tensors[0]._local.device
    # Without the key, ranks that gather different things of equal size would not notice.
    key = zlib.crc32(repr([(what, t._spec.name, t._spec.shape, t._local.dtype) for t in tensors]).encode())
    cuts = _cuts(tensors, key, what)
    nbytes = [
        [_padded(one.length * t._local.element_size()) for one in cut] for t, cut in zip(tensors, cuts, strict=True)
    ]
    sizes = [sum(of_rank) for of_rank in zip(*nbytes, strict=True)]
    own = torch.empty(sizes[comm.rank], dtype=torch.uint8, device=device)
    for t, place in zip(tensors, _places(own, cuts, tensors, comm.rank), strict=True):
        place.copy_(t._local.detach())
    fulls = [torch.empty_strided(t._spec.shape, t._spec.stride, dtype=t._local.dtype, device=device) for t in tensors]
    for rank, row in enumerate(_rows(comm, own, sizes, key, what)):
        for t, full, cut, values in zip(tensors, fulls, cuts, _places(row, cuts, tensors, rank), strict=True):
            cut[rank].fill(full, values, t._spec)
    return fulls


def _rows(comm: ScalarComm, own: torch.Tensor, sizes: Sequence[int], key: int, what: str) -> Iterator[torch.Tensor]:
    """Yield the bytes of each rank: `own` are this rank's, `sizes` all ranks' numbers of bytes. Collective.

    Raises:
        DivergenceError: another rank gathers something else; found on the CPU only.
    """
    largest, senders = max(sizes), sum(map(bool, sizes))
    marked = torch.empty(_KEY + largest, dtype=torch.uint8, device=own.device)
    marked[:_KEY].view(torch.int64).fill_(key)
    # An all-gather sends from each rank, and needs memory for, as much as the rank with the most has. So where few ranks have
    # something, or some have much more than others, each broadcasts what it has.
    if comm.size * largest > _SMALL and (senders <= _BROADCASTS or comm.size * largest > 2 * sum(sizes)):
        _check_keys(comm, comm.all_gather(marked[:_KEY], what) if own.device.type == "cpu" else None, key, what)
        del marked
        for rank, size in enumerate(sizes):
            row = own if rank == comm.rank else torch.empty(size, dtype=torch.uint8, device=own.device)
            if size and comm.size > 1:
                comm.broadcast(row, rank, what)
            yield row
        comm.bytes_sent += (comm.size - 1) * own.numel()
        return
    marked[_KEY : _KEY + own.numel()] = own
    gathered = comm.all_gather(marked, what)
    comm.bytes_sent += (comm.size - 1) * marked.numel()
    _check_keys(comm, gathered[:, :_KEY], key, what)
    for row, size in zip(gathered, sizes, strict=True):
        yield row[_KEY : _KEY + size]


def _check_keys(comm: ScalarComm, keys: torch.Tensor | None, key: int, what: str) -> None:
    # Keys on a GPU are not compared, because the host would have to wait for them.
    if (
        keys is None
        or keys.device.type != "cpu"
        or set(keys.contiguous().view(torch.int64).flatten().tolist()) == {key}
    ):
        return
    raise DivergenceError(
        f"rank {comm.world_rank}: {what} met another operation of other ranks. It is collective: call it on all ranks, in "
        "one order."
    )


@dataclass(frozen=True)
class _Cut:
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


def _cuts(tensors: Sequence[ShardTensor], key: int, what: str) -> list[list[_Cut]]:
    """Return for each tensor what each rank has of it.

    Collective where tensor parallelism cuts a tensor, because other ranks' shards don't follow from this rank's layout then.
    """
    comm, device = tensors[0]._spec.comm, tensors[0]._local.device
    split = [(t._spec, part) for t in tensors if (part := t._spec.part) is not None]
    told: Iterator[list[list[int]]] = iter(())
    if split:
        mine = [[spec.start, spec.stop, *_along(part)] for spec, part in split]
        everyone = comm.all_gather(torch.tensor([[key] * 5, *mine], device=device), what)
        _check_keys(comm, everyone[:, 0], key, what)
        told = iter(everyone[:, 1:].transpose(0, 1).tolist())
    return [
        [_Cut(*values) for values in next(told)]
        if t._spec.part is not None
        else [_Cut(*t._spec.layout.owned(t._spec.index, rank)) for rank in range(comm.size)]
        for t in tensors
    ]


def _along(part: TensorPart) -> tuple[int, int, int]:
    """Return the dimension that is cut, and the part's offset and size in it."""
    return part.dim, part.offsets[part.dim], part.sizes[part.dim]


def _places(row: torch.Tensor, cuts: list[list[_Cut]], tensors: Sequence[ShardTensor], rank: int) -> list[torch.Tensor]:
    """Return the views of a rank's bytes that hold its shard of each tensor: 1-D, of the tensor's dtype."""
    found, at = [], 0
    for t, cut in zip(tensors, cuts, strict=True):
        size = cut[rank].length * t._local.element_size()
        found.append(row[at : at + size].view(t._local.dtype))
        at += _padded(size)
    return found


def _padded(size: int) -> int:
    return -(-size // _KEY) * _KEY  # a multiple of every dtype's alignment


def to_gather(cls: type[ShardTensor], name: str, tensors: Sequence[Any], target: Any) -> list[ShardTensor]:
    """Return the operands of which a function may be given full copies; none if it may not run on copies.

    `target` is what the function writes to; it is never copied, because an edit of a copy would be lost.
    """
    if name.startswith("as_strided"):  # its arguments are places in the tensor's own memory
        return []
    if isinstance(target, (list, tuple)) and any(isinstance(t, cls) for t in target):
        return []
    found = {id(t): t for t in tensors if isinstance(t, cls) and t is not target}
    return list(found.values()) if all(map(stands_alone, found.values())) else []


def on_copies(
    cls: type[ShardTensor],
    func: Any,
    name: str,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    sharded: Sequence[ShardTensor],
) -> Any:
    """Run a function with full copies in place of `sharded` among its operands. Collective.

    Raises:
        NeedsGatherError: the result is a view of a copy, or a copy was edited.
    """
    more = f" and {len(sharded) - 1} more" if len(sharded) > 1 else ""
    with torch.inference_mode(False):  # an inference tensor would not show whether it was edited
        copies = full_tensors(sharded, f"{name} of the sharded {sharded[0]._spec.name}{more}")
    versions = [copy._version for copy in copies]
    found = {id(t): copy for t, copy in zip(sharded, copies, strict=True)}
    args = tuple(substituted(value, found) for value in args)
    result = func(*args, **{key: substituted(value, found) for key, value in kwargs.items()})
    storages = {copy.untyped_storage()._cdata for copy in copies}
    if [copy._version for copy in copies] != versions or any(_lies_in(cls, t, storages) for t in tensors_in(result)):
        why = "gives a view with gaps in memory, or edits in place, and an edit of a copy would be lost; read .full_tensor()"
        raise gather_error([t._spec for t in sharded], name, why)
    return result


def _lies_in(cls: type[ShardTensor], tensor: torch.Tensor, storages: set[int]) -> bool:
    if isinstance(tensor, cls) or tensor.layout is not torch.strided:
        return False
    return memory_of(tensor).untyped_storage()._cdata in storages


def substituted(value: Any, others: Mapping[int, Any]) -> Any:
    """Return a function's operand with tensors replaced by `others`, by id, also inside lists and tuples."""
    if isinstance(value, torch.Tensor):
        return others.get(id(value), value)
    if isinstance(value, (tuple, list)):
        items = [substituted(item, others) for item in value]
        if isinstance(value, tuple):
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        return items
    return value
