"""The specification of a ShardTensor: the parameter, this rank's shard of it, and how to cut that out of a full tensor."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from ..comm.small_collectives import ScalarComm
from ..errors import NeedsGatherError
from ..layout.dtensor_placement import is_dtensor, part_given
from ..layout.flat_layout import Box, FlatLayout
from ..layout.tensor_part import TensorPart
from ..utils.pytree import tensors_in
from .state import STATE, is_mixed


@dataclass(frozen=True, eq=False)
class ShardSpec:
    """The parameter that a ShardTensor belongs to, and this rank's range of it.

    Attributes:
        layout: the flat layout that places the parameter.
        index: the parameter's position in ``layout.slots``.
        rank: this rank's position in ``layout``.
        comm: collectives over the ranks that share the parameter.
        part: the part that the layout places, if tensor parallelism cuts the parameter; None if the layout places all of it.
        name, shape, stride, numel: the full parameter's name, shape, strides and number of elements.
        start, stop: this rank's elements, in memory order, of the parameter or the part that the layout places.
        length: the number of these elements.
        cut: a key that is equal for two specs exactly if shape, strides and every rank's shard are equal.
    """

    layout: FlatLayout
    index: int
    rank: int
    comm: ScalarComm
    part: TensorPart | None = None
    name: str = field(init=False)
    shape: torch.Size = field(init=False)
    stride: tuple[int, ...] = field(init=False)
    numel: int = field(init=False)
    start: int = field(init=False)
    stop: int = field(init=False)
    length: int = field(init=False)
    cut: tuple[object, ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        slot = self.layout.slots[self.index]
        start, stop = self.layout.owned(self.index, self.rank)
        owners = self.layout.owners(self.index)
        # All ranks' shards follow from the first boundary and the distance between boundaries.
        first_stop = self.layout.owned(self.index, owners.start)[1] if owners else 0
        step = self.layout.shard_numel if len(owners) > 2 else 0
        cut: tuple[object, ...] = (slot.shape, slot.stride, owners, first_stop, step, self.rank)
        shape, stride = slot.shape, slot.stride
        if self.part is not None:
            # Other ranks' parts may be cut differently. Their cuts follow from the full shape and the number of parts.
            shape, stride, cut = self.part.shape, self.part.stride, (*cut, self.part)
        vars(self).update(
            name=slot.name,
            shape=torch.Size(shape),
            stride=stride,
            numel=math.prod(shape),
            start=start,
            stop=stop,
            length=stop - start,
            cut=cut,
        )

    @property
    def world_rank(self) -> int:
        """This rank among all ranks of the engine, for messages."""
        return self.comm.world_rank

    def boxes(self) -> tuple[Box, ...]:
        """Return the boxes that this rank has of the full parameter, in the order of the shard's elements."""
        found = self.layout.boxes(self.index, self.start, self.stop)
        return found if self.part is None else tuple(map(self.part.moved, found))


def boxes_in(values: torch.Tensor, order: Sequence[int], boxes: Iterable[Box]) -> Iterator[tuple[Box, torch.Tensor]]:
    """Yield each of a shard's `boxes` with its values, as a view in the parameter's dimensions.

    Args:
        values: the shard's elements, 1-D.
        order: the parameter's dimensions by descending stride.
        boxes: the boxes into which :meth:`.FlatLayout.boxes` cuts the shard, moved or not.
    """
    inverse = sorted(range(len(order)), key=order.__getitem__)
    position = 0
    for box in boxes:
        part = values[position : position + box.numel]
        yield box, part.view([box.sizes[dim] for dim in order]).permute(inverse)
        position += box.numel


def gather_error(operands: Any, what: Any, why: str = "needs the full parameter") -> NeedsGatherError:
    """Return the error for an operation that can't be computed on shards.

    Args:
        operands: the operation's operands, sharded ones and others, nested; or the :class:`ShardSpec` of the sharded one.
        what: the operation or its name.
        why: the reason.
    """
    specs = [operands] if isinstance(operands, ShardSpec) else []
    specs = specs or [t._shard_state.spec for t in tensors_in(operands) if hasattr(t, STATE)]  # type: ignore[attr-defined]
    names = ", ".join(dict.fromkeys(spec.name for spec in specs)) or "tensor"
    handle = specs[0].comm.watchdog.handle if specs else "engine"
    message = (
        f"rank {specs[0].world_rank if specs else '?'}: {str(what).removeprefix('__get__:')} on the sharded {names} {why}. Use "
        f"`with {handle}.gathered(parameter):` around it (grads=True for its gradient, write=True to keep changes)."
    )
    step = specs[0].comm.unknown_step if specs else None
    return NeedsGatherError(message if step is None else step.refuse(message))


def refuse_unreduced(operands: Any, what: Any) -> None:
    """Raise if a function needs all elements of a gradient whose reduction ``no_sync()`` defers, or of a result of one.

    Each rank holds a shard of a gradient of its own, so that the shards don't form one tensor. With ``no_shard`` each rank holds
    all of its own gradient, already divided by the number of ranks.

    Raises:
        NeedsGatherError: one of the operands, which may be nested, is such a tensor.
    """
    for t in tensors_in(operands):
        if is_mixed(t):
            spec: ShardSpec = getattr(t, STATE).spec
            raise NeedsGatherError(
                f"rank {spec.world_rank}: {getattr(what, '_opname', what)}: the gradient of {spec.name}, or what was computed "
                "from it, is each rank's own, because it comes from a backward under engine.no_sync(). Read and use gradients "
                "after the backward that reduces."
            )


def same_cut(a: ShardSpec, b: ShardSpec) -> bool:
    """Return True if, on all ranks, elements at one position of two local shards have one position in the full tensors."""
    return a is b or (a.cut == b.cut and _same_ranks(a.comm, b.comm))


def _same_ranks(a: ScalarComm, b: ScalarComm) -> bool:
    """Return True if two communicators are over the same process group, on which each engine has its own."""
    if a.channel is None or b.channel is None:
        return a.channel is b.channel
    return a.channel.group is b.channel.group


def shard_of_full(full: torch.Tensor, spec: ShardSpec) -> torch.Tensor:
    """Return this rank's shard of a full tensor. Differentiable, not collective.

    Args:
        full: a plain tensor of shape ``spec.shape``, any strides and dtype; or a DTensor distributed as the parameter was.
        spec: the shard.

    Returns:
        1-D tensor of ``spec.length`` elements in memory order; a view of `full` where its strides allow one.
    """
    if full.shape != spec.shape:
        raise ValueError(f"{spec.name} has shape {tuple(spec.shape)}, not {tuple(full.shape)}.")
    if is_dtensor(full):
        full = part_given(full, spec.part, spec.name)
    elif spec.part is not None:
        for dim, size in enumerate(spec.part.sizes):
            if size != full.shape[dim]:
                full = full.narrow(dim, spec.part.offsets[dim], size)
    return shard_of_part(full, spec)


def shard_of_part(full: torch.Tensor, spec: ShardSpec) -> torch.Tensor:
    """Return this rank's shard of `full`, which is only a part of the parameter where tensor parallelism cuts that.

    Otherwise it does the same as :func:`shard_of_full`.
    """
    if spec.length == 0:
        return full.new_empty(0) if not full.requires_grad else full.reshape(-1)[:0]
    order = spec.layout.slots[spec.index].order
    permuted = full.permute(order)
    if permuted.is_contiguous():
        return permuted.reshape(-1)[spec.start : spec.stop]
    if not any(step and size > 1 for step, size in zip(full.stride(), full.shape, strict=True)):
        return full[(0,) * full.dim()].expand(spec.length)  # one value everywhere, which needs no memory
    parts = []
    # Box by box, because the copy of an expanded operand may be far larger than its memory.
    for box in spec.layout.boxes(spec.index, spec.start, spec.stop):
        part = full
        for dim, (offset, size) in enumerate(zip(box.offsets, box.sizes, strict=True)):
            if size != full.shape[dim]:
                part = part.narrow(dim, offset, size)
        parts.append(part.permute(order).reshape(-1))
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def broadcast_shard(operand: torch.Tensor, spec: ShardSpec, what: Any) -> torch.Tensor:
    """Return this rank's shard of a plain operand that is broadcast to the parameter's global shape.

    A 0-dim operand is returned as it is, so that it takes part in type promotion as in plain torch.

    Raises:
        RuntimeError: plain torch would not broadcast the two shapes either.
        NeedsGatherError: the result would be larger than the parameter.
    """
    if operand.dim() == 0 and len(spec.shape) > 0:
        return operand
    if operand.shape != spec.shape:
        result = torch.broadcast_shapes(spec.shape, operand.shape)
        if result != spec.shape:
            raise gather_error(
                spec,
                what,
                f"of shape {tuple(spec.shape)} with a tensor of shape {tuple(operand.shape)} gives {tuple(result)}, "
                "which needs the full parameter",
            )
        operand = operand.expand(spec.shape)
    return shard_of_full(operand, spec)
