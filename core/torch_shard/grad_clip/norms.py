"""Norms of sharded gradients: the norm of a rank's shards, and the collective that combines the ranks' norms."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Container, Sequence
from typing import Any, TypeAlias

import torch

from ..comm.collectives import Collectives
from ..comm.streams import streams_of
from ..offload.host_gradients import PIECE
from ..shard_tensor.host_memory import flat_of
from ..shard_tensor.unsharded_param import own_grad
from ..unit.flat_buffer import FlatBuffer

_flat, _spec = map(operator.attrgetter, ("_shard_state.flat", "_shard_state.spec"))

Owners: TypeAlias = tuple[Collectives, Any]
"""The ranks that share some shards: a communicator over them, and the collectives of the engine that it belongs to."""


def wide_dtype(dtypes: Sequence[torch.dtype]) -> torch.dtype:
    """Return the dtype for norms of gradients of these dtypes.

    It is at least fp32, because half precision would round once more for each rank.
    """
    wide = torch.float64 in dtypes or torch.complex128 in dtypes
    return torch.float64 if wide else torch.float32


def common_shard(flat: FlatBuffer, chosen: Container[int] | None, wait: bool = True) -> torch.Tensor | None:
    """Return the 1-D tensor whose parts are all gradients of `flat`, as the reduction left them; None if there is none.

    It stands for all of them, since its padding is zero: one kernel instead of one for each parameter.

    Args:
        flat: the buffer.
        chosen: ids of the parameters that count, which must be all of the buffer's; None for all.
        wait: wait until a tensor that is on its way to host memory may be read.
    """
    if chosen is not None and not all(map(chosen.__contains__, map(id, flat.params))):
        return None
    with torch._C.DisableTorchFunctionSubclass():
        try:
            grads = list(map(own_grad, flat.params))
            found = list(map(_flat if wait or flat.host is None else flat_of, grads))
            # A gradient from the reduction has its parameter's own spec, one that was assigned by hand has another.
            own = all(map(operator.is_, map(_spec, grads), map(_spec, flat.params)))
        except AttributeError:
            return None
    base: torch.Tensor | None = found[0]
    return base if own and all(map(operator.is_, found, itertools.repeat(base))) else None


def local_norm(
    tensors: Sequence[torch.Tensor],
    p: float,
    dtype: torch.dtype,
    device: torch.device,
    known: Callable[[torch.Tensor, float], list[torch.Tensor] | None] = lambda tensor, p: None,
) -> torch.Tensor:
    """Return the norm of all `tensors` together, 0-d, of `dtype`, on `device`.

    `known` returns the norms of a tensor's pieces if they were taken before, else None.
    """
    norms: list[torch.Tensor | None] = []
    pieces: list[torch.Tensor] = []
    for tensor in tensors:
        if not tensor.numel():
            continue
        found = known(tensor, p)
        if found is not None:
            norms += found
        else:
            cut = _pieces(tensor)
            pieces += cut
            norms += [None] * len(cut)  # in its place, since the order of a sum shows in its last bits
    if not norms:  # the value that does not change a norm of norms
        return torch.full((), math.inf if p < 0 else 0.0, dtype=dtype, device=device)
    made = iter(torch._foreach_norm(pieces, p, dtype=dtype) if pieces else ())
    values = [next(made) if norm is None else norm for norm in norms]
    if any(value.device != device or value.dtype != dtype for value in values):
        values = [value.to(device, dtype, non_blocking=True) for value in values]
    return torch.linalg.vector_norm(torch.stack(values), p)


def _pieces(tensor: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return the parts of `tensor` whose norms are taken.

    On the CPU torch adds in fp32, with which the norm of 40M equal elements comes out 0.2 % too small.
    """
    if tensor.is_complex():
        tensor = tensor.abs()
    if streams_of(tensor.device).exist or tensor.numel() <= 2 * PIECE or not tensor.is_contiguous():
        return (tensor,)
    return tensor.view(-1).split(PIECE)


def gather_columns(
    c: Collectives, columns: Sequence[tuple[Owners | None, torch.Tensor]], what: str
) -> list[torch.Tensor]:
    """Gather 1-D tensors of the ranks in one collective, and return those that count.

    All ranks get the same values, because all have to scale their gradients by one factor. Replicas, and data-parallel groups
    for parameters that tensor parallelism does not cut, have equal gradients but for rounding: those of the first one count.

    Args:
        c: the engine's collectives.
        columns: the ranks that share the shards (None where rank 0's values count), and this rank's values, for each column.
        what: the operation, for messages.

    Returns:
        For each column a tensor of the counted ranks' values, with one row for each rank.
    """
    values = [column for _, column in columns]
    if all(owners and owners[1].size == 1 and owners[0].topology.data_parallel_groups == 1 for owners, _ in columns):
        return [column.unsqueeze(0) for column in values]
    table = c.all_ranks.all_gather(torch.cat(values), what)
    counted = []
    for (owners, _), part in zip(columns, table.split([len(column) for column in values], dim=1), strict=True):
        ranks: Sequence[int] = (0,)
        if owners is not None:
            own, comm = owners  # another engine may have another topology
            ranks = own.topology.full_model_group_of(0) if comm is own.full_model else own.topology.shard_groups[0]
        counted.append(part[list(ranks)] if len(ranks) < c.world else part)
    return counted
