"""Collectives called on the process group itself, for the calls of every unit and step, where Python's overhead counts.

Each call of torch.distributed's functions looks for tensor subclasses, checks arguments, looks for a coalescing context and
makes a new object of options. This costs as much as the rest of a small collective. The engine's own groups carry plain
tensors outside any coalescing context, so this module calls the methods of ``torch.distributed.ProcessGroup`` as
torch.distributed's functions call them. The layers below stay in use: the dispatcher's ``c10d`` operators, the wrapper of
TORCH_DISTRIBUTED_DEBUG=DETAIL, and the flight recorder.

The methods are not documented. torch 2.11 and 2.12 have them under older names.

All functions are collective and asynchronous: they return the ``Work``, and the tensors must live until the work has ended.
``Collectives._start`` calls them outside of hooks of saved tensors, under which they may deadlock.
With `on_stream` the collective runs on the device's current stream instead of one of the backend's own, which saves an event and
a wait each way (``async_op=False``, since torch 2.8). Then no work is returned, unless the backend uses its own stream all the
same. Complex numbers are sent as pairs of real numbers, because some backends don't know them.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from ..versions import at_least
from .work import Works

# torch 2.13 renamed the single-tensor collectives and warns about the old names; 2.11 and 2.12 lack the new ones.
_NEW = at_least("2.13")
all_gather_single: Any = getattr(dist, "all_gather_single" if _NEW else "all_gather_into_tensor", None)
reduce_scatter_single: Any = getattr(dist, "reduce_scatter_single" if _NEW else "reduce_scatter_tensor", None)

_ALL_GATHER = "all_gather_single" if _NEW else "_allgather_base"
_ALL_GATHER_COALESCED = "all_gather_single_coalesced" if _NEW else "allgather_into_tensor_coalesced"
_REDUCE_SCATTER = "reduce_scatter_single" if _NEW else "_reduce_scatter_base"
_ALL_TO_ALL = "all_to_all_single" if _NEW else "alltoall_base"


@functools.cache
def _options(name: str, root: int | None = None, on_stream: bool = False, mean: bool = False) -> Any:
    """Return the options of a call, which all calls share and only read. Reductions sum, unless they take the `mean`."""
    options = getattr(dist.distributed_c10d, name)()
    options.asyncOp = not on_stream
    if mean:
        options.reduceOp = dist.ReduceOp.AVG
    if root is not None:
        options.rootRank, options.rootTensor = root, 0
    return options


def _real(*tensors: torch.Tensor) -> Sequence[torch.Tensor]:
    """Return tensors of one dtype, complex ones as pairs of real numbers."""
    return [torch.view_as_real(t) for t in tensors] if tensors[0].is_complex() else tensors


def all_gather(group: Any, output: torch.Tensor, sent: torch.Tensor, on_stream: bool = False) -> Any:
    """Fill `output` with the ranks' `sent`, in the order of the ranks. Both tensors must be contiguous."""
    options = _options("AllgatherOptions", on_stream=on_stream)
    return getattr(group, _ALL_GATHER)(*_real(output, sent), options)


def all_gather_coalesced(
    group: Any, outputs: Sequence[torch.Tensor], sent: Sequence[torch.Tensor], on_stream: bool = False
) -> Any:
    """Fill each of `outputs` as :func:`all_gather` does, in one launch. Their dtypes may differ."""
    options = _options("AllgatherOptions", on_stream=on_stream)
    pairs = [_real(*pair) for pair in zip(outputs, sent, strict=True)]
    into, shards = map(list, zip(*pairs, strict=True))
    return getattr(group, _ALL_GATHER_COALESCED)(into, shards, options)


def broadcast_each(group: Any, slots: Sequence[torch.Tensor]) -> Works:
    """Overwrite each of `slots`, one for each rank, with the tensor of that rank."""
    return Works([group.broadcast(list(_real(slot)), _options("BroadcastOptions", i)) for i, slot in enumerate(slots)])


def reduce_scatter(
    group: Any, output: torch.Tensor, sent: torch.Tensor, on_stream: bool = False, mean: bool = False
) -> Any:
    """Fill `output` with this rank's shard of the sum or the `mean` of all `sent`. Both tensors must be contiguous."""
    options = _options("ReduceScatterOptions", on_stream=on_stream, mean=mean)
    return getattr(group, _REDUCE_SCATTER)(*_real(output, sent), options)


def all_to_all(
    group: Any,
    output: torch.Tensor,
    sent: torch.Tensor,
    sizes: tuple[list[int], list[int]] = ([], []),
    on_stream: bool = False,
) -> Any:
    """Send each rank a part of `sent`, and fill `output` with the parts received from the ranks.

    `sizes` are those of the parts received and of the parts sent, by rank; equal ones by default.
    """
    options = _options("AllToAllOptions", on_stream=on_stream)
    return getattr(group, _ALL_TO_ALL)(*_real(output, sent), *sizes, options)


def all_reduce(group: Any, tensor: torch.Tensor, on_stream: bool = False, mean: bool = False) -> Any:
    """Replace `tensor` with the sum or the `mean` of all ranks' tensors."""
    options = _options("AllreduceOptions", on_stream=on_stream, mean=mean)
    return group.allreduce(list(_real(tensor)), options)
