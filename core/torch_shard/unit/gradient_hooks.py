"""The hooks through which gradients come to a flat buffer."""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING

import torch

from ..layout.dtensor_placement import is_dtensor
from ..shard_tensor.spec import shard_of_part
from ..shard_tensor.tensor import ShardTensor
from .held_gradients import is_unshared

if TYPE_CHECKING:
    from .flat_buffer import FlatBuffer


def take_grad(
    flat_ref: weakref.ref[FlatBuffer], index: int, grads: tuple[torch.Tensor | None, ...]
) -> tuple[None, ...] | None:
    """Take the gradient of an unsharded parameter when it is complete, so that autograd accumulates nothing.

    Autograd calls this hook after the user's hooks.
    """
    flat = flat_ref()
    unit = None if flat is None else flat.unit()
    if flat is None or unit is None:
        return None
    if grads[0] is not None:
        if flat.distributed:
            part, streams = flat.part_of(grads[0], index), flat.collectives.streams
            if streams.exist:
                # Hazard: the stream that made the gradient would use its memory again while this one still reads it. Autograd
                # prevents that for plain tensors, but does not see the memory of a DTensor.
                part.record_stream(streams.current())
            unit.runtime.on_grad(unit, flat, index, part)
        else:
            unshared = flat.gradients.can_hold and not grads[0].is_sparse and is_unshared(grads)
            unit.runtime.on_grad(unit, flat, index, grads[0], unshared)
    return (None,)


def average_past_unit(flat_ref: weakref.ref[FlatBuffer], index: int, grad: torch.Tensor | None) -> torch.Tensor | None:
    """Average a plain gradient over the ranks; a gradient hook on the sharded parameter itself. Collective.

    Such a gradient has gone past the engine: a `torch.autograd.Function` was given another module's weight, say. It is
    this rank's own and has to be averaged as any other.
    """
    flat = flat_ref()
    if flat is None or grad is None or isinstance(grad, ShardTensor):
        return None
    c, spec = flat.collectives, flat.params[index]._spec
    # A plain gradient of a parameter that tensor parallelism cuts comes from a computation that each of all ranks has made
    # for itself.
    among = c.all_ranks if flat.split and not is_dtensor(grad) else c.data_parallel
    total = grad.detach().clone() if not is_dtensor(grad) else flat.part_of(grad.detach(), index).clone()
    if among.size > 1:
        among.all_reduce(total, "sum", f"the gradient of {spec.name}, used past its unit")
    total.div_(among.size)
    if flat.split and is_dtensor(grad):
        return ShardTensor(shard_of_part(total, spec).clone(), spec)
    return ShardTensor.from_full(total, spec)
