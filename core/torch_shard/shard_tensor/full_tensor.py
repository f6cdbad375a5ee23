"""Whole copies of ShardTensors, and functions of gradients and optimizer state that need them.

What plain torch computes into new memory (a matrix product, ``torch.cat``, a sum over one dimension) is computed from gathered
copies where slices can't give it. Nobody keeps a copy: what would be a view of one, or edit one, is an error.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from ..errors import DivergenceError
from ..layout.flat_layout import FlatLayout, ParamMeta
from ..layout.tensor_part import TensorPart, dense_stride
from ..utils.pytree import tensors_in
from .spec import ScalarComm, ShardSpec, boxes_in, gather_error
from .unsharded_param import memory_of
from .views import stands_alone

if TYPE_CHECKING:
    from .tensor import ShardTensor

__all__ = ["full_tensors", "on_copies", "substituted", "to_gather"]

_KEY = 16  # bytes that say what a rank gathers
_SMALL = 1 << 16  # bytes of a message whose size does not matter
_BROADCASTS = 4  # as in collectives


def full_tensors(tensors: Sequence[ShardTensor], what: str) -> list[torch.Tensor]:
    """Return the whole of each tensor: plain, original shape and strides, no gradient. `what` is for messages.

    Collective, one message for all that share ranks and device: each rank sends its slices, as bytes, whatever the dtypes are,
    and they count as sent.

    Raises:
        DivergenceError: another rank gathers something else (on the CPU).
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
            wholes = _gathered([tensors[i] for i in members], what)
            for i, whole in zip(members, wholes, strict=True):
                results[i] = whole
    return results


def _gathered(tensors: Sequence[ShardTensor], what: str) -> list[torch.Tensor]:
    comm, device = tensors[0]._spec.comm, tensors[0]._local.device
    # What each rank gathers, so that something else of the same size does not go unnoticed.
    key = zlib.crc32(repr([(what, t._spec.name, t._spec.shape, t._local.dtype) for t in tensors]).encode())
    cuts = _cuts(tensors, key, what)
    nbytes = [
        [_padded(one.length * t._local.element_size()) for one in cut] for t, cut in zip(tensors, cuts, strict=True)
    ]
    sizes = [sum(of_rank) for of_rank in zip(*nbytes, strict=True)]
    own = torch.empty(sizes[comm.rank], dtype=torch.uint8, device=device)
    for t, place in zip(tensors, _places(own, cuts, tensors, comm.rank), strict=True):
        place.copy_(t._local.detach())
    wholes = [torch.empty_strided(t._spec.shape, t._spec.stride, dtype=t._local.dtype, device=device) for t in tensors]
    for rank, row in enumerate(_rows(comm, own, sizes, key, what)):
        for t, whole, cut, values in zip(tensors, wholes, cuts, _places(row, cuts, tensors, rank), strict=True):
            cut[rank].fill(whole, values, t._spec)
    return wholes


def _rows(comm: ScalarComm, own: torch.Tensor, sizes: Sequence[int], key: int, what: str) -> Iterator[torch.Tensor]:
    """Yield the bytes of each rank, `own` of this one; `sizes` are those of all. Collective, also for a rank without any.

    Raises:
        DivergenceError: another rank gathers something else (on the CPU).
    """
    largest, senders = max(sizes), sum(map(bool, sizes))
    marked = torch.empty(_KEY + largest, dtype=torch.uint8, device=own.device)
    marked[:_KEY].view(torch.int64).fill_(key)
    # An all-gather takes as much of each rank as of the one that has the most, and memory for that. So where it is few ranks that
    # have something, or some have much more than others, each broadcasts what it has.
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
    # The host does not wait for a GPU.
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
    """What one rank has of a tensor: elements in memory order of the tensor, or of the part of it that `dim`, `offset` and `size`
    tell, where tensor parallelism cuts it."""

    start: int
    stop: int
    dim: int | None = None
    offset: int = 0
    size: int = 0

    @property
    def length(self) -> int:
        return self.stop - self.start

    def fill(self, whole: torch.Tensor, values: torch.Tensor, spec: ShardSpec) -> None:
        """Put the `values` that the rank has, 1-D, into the whole tensor."""
        if self.dim is None:
            whole.as_strided((spec.numel,), (1,))[self.start : self.stop] = values
            return
        part = whole.narrow(self.dim, self.offset, self.size)
        meta = ParamMeta(spec.name, tuple(part.shape), dense_stride(tuple(part.shape), spec.stride))
        layout = FlatLayout.build([meta], values.element_size(), 1)
        for box, place in boxes_in(values, layout.slots[0].order, layout.boxes(0, self.start, self.stop)):
            part[tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))] = place


def _cuts(tensors: Sequence[ShardTensor], key: int, what: str) -> list[list[_Cut]]:
    """Who has what of each tensor, by rank. Collective where tensor parallelism cuts one: other ranks' slices do not follow from
    this one's layout then."""
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
    """The dimension that is cut, and where the part lies in it."""
    return part.dim, part.offsets[part.dim], part.sizes[part.dim]


def _places(row: torch.Tensor, cuts: list[list[_Cut]], tensors: Sequence[ShardTensor], rank: int) -> list[torch.Tensor]:
    """What a rank's bytes hold of each tensor, as 1-D tensors of its dtype."""
    found, at = [], 0
    for t, cut in zip(tensors, cuts, strict=True):
        size = cut[rank].length * t._local.element_size()
        found.append(row[at : at + size].view(t._local.dtype))
        at += _padded(size)
    return found


def _padded(size: int) -> int:
    return -(-size // _KEY) * _KEY  # every dtype may begin there


def to_gather(cls: type[ShardTensor], name: str, tensors: Sequence[Any], target: Any) -> list[ShardTensor]:
    """Return the operands of which a function may have copies, where slices can't answer it; none where it may not. `target`:
    what it writes to, which stays as it is: an edit of a copy would be lost."""
    if name.startswith("as_strided"):  # places in the tensor's own memory
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
    """Run a function with copies of `sharded` among its operands. Collective.

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
    """A function's operand, with `others`, by id, in place of tensors, in lists and tuples, too."""
    if isinstance(value, torch.Tensor):
        return others.get(id(value), value)
    if isinstance(value, (tuple, list)):
        items = [substituted(item, others) for item in value]
        if isinstance(value, tuple):
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        return items
    return value
