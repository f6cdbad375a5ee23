"""Whole copies of ShardTensors, and functions of gradients and optimizer state that need them.

What plain torch computes into new memory (a matrix product, ``torch.cat``, a sum over one dimension) is computed from gathered
copies where slices can't give it. Nobody keeps a copy: what would be a view of one, or edit one, is an error.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..errors import DivergenceError
from ..utils.pytree import tensors_in
from .spec import gather_error
from .unsharded_param import memory_of
from .views import stands_alone

if TYPE_CHECKING:
    from .tensor import ShardTensor

__all__ = ["full_tensors", "on_copies", "substituted", "to_gather"]


def full_tensors(tensors: Sequence[ShardTensor], what: str) -> list[torch.Tensor]:
    """Return the whole of each tensor: plain, original shape and strides, no gradient. `what` is for messages.

    Collective, one message for all that share ranks and device. Tensors of one message share new memory.

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
    # A sum with zeros everywhere else, as integers: exact to the bit (also -0.0 and NaN), whatever the slices' lengths are, and
    # no more memory than the result.
    sizes = [-(-t._spec.numel * t._local.element_size() // 16) * 16 for t in tensors]
    comm, device = tensors[0]._spec.comm, tensors[0]._local.device
    buffer = torch.zeros(sum(sizes) // 8 + 1, dtype=torch.int64, device=device)
    places = buffer.view(torch.uint8)[:-8].split(sizes)
    wholes = []
    for t, place in zip(tensors, places, strict=True):
        spec, local = t._spec, t._local.detach()
        flat = place[: spec.numel * local.element_size()].view(local.dtype)
        whole = flat.as_strided(tuple(spec.shape), spec.stride)
        if spec.part is None:
            flat[spec.start : spec.stop].copy_(local)
        else:
            for box, values in t._boxes():
                whole[tuple(slice(at, at + size) for at, size in zip(box.offsets, box.sizes, strict=True))] = values
        wholes.append(whole)
    # What each rank gathers, so that something else of the same size does not go unnoticed.
    key = zlib.crc32(repr([(what, t._spec.name, t._spec.shape, t._local.dtype) for t in tensors]).encode())
    buffer[-1] = key
    comm.all_reduce(buffer, "sum", what)
    if device.type == "cpu" and buffer[-1].item() != key * comm.size:  # the host does not wait for a GPU
        raise DivergenceError(
            f"rank {comm.world_rank}: {what} met another operation of other ranks. It is collective: call it on all ranks, in "
            "one order."
        )
    return wholes


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
