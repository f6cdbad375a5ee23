"""Collectives called on the process group itself, for the calls of every unit and step, where Python's overhead counts.

Each call of torch.distributed's functions looks for tensor subclasses, checks arguments, looks for a coalescing context and
makes a new object of options. This costs as much as the rest of a small collective. The engine's own groups carry plain
tensors outside any coalescing context, so this module calls the methods of ``torch.distributed.ProcessGroup`` as
torch.distributed's functions call them. The layers below stay in use: the dispatcher's ``c10d`` operators, the wrapper of
TORCH_DISTRIBUTED_DEBUG=DETAIL, and the flight recorder.

The methods are not documented. They are tested with torch 2.13; torch 2.11 has them under older names. The public function is
called if a method is missing, and for complex numbers, which some backends don't know.

All functions are collective and asynchronous: they return the ``Work``, and the tensors must live until the work has ended.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist

from ..versions import at_least

__all__ = [
    "all_gather",
    "all_gather_single",
    "all_reduce",
    "all_to_all",
    "broadcast",
    "reduce_scatter",
    "reduce_scatter_single",
]

# torch 2.13 renamed the single-tensor collectives and warns about the old names; 2.11 and 2.12 lack the new ones.
all_gather_single = getattr(dist, "all_gather_single" if at_least("2.13") else "all_gather_into_tensor", None)
reduce_scatter_single = getattr(dist, "reduce_scatter_single" if at_least("2.13") else "reduce_scatter_tensor", None)

_group_class: Any = getattr(dist, "ProcessGroup", None)  # None: a torch built without torch.distributed
_c10d: Any = getattr(dist, "distributed_c10d", None)


def _method(*names: str) -> str:
    """Return the first of `names` (newest first) that is a method of process groups; "" if there is none."""
    return next((name for name in names if hasattr(_group_class, name)), "")


def _options(name: str, **values: Any) -> Any:
    """Return the options of an asynchronous call, which all calls share and only read; None if torch lacks their class."""
    made = getattr(_c10d, name, None)
    if made is None:
        return None
    options = made()
    for key, value in {"asyncOp": True, **values}.items():
        setattr(options, key, value)
    return options


_ALL_GATHER = _method("all_gather_single", "_allgather_base")
_ALL_GATHER_OPTIONS = _options("AllgatherOptions")
_REDUCE_SCATTER = _method("reduce_scatter_single", "_reduce_scatter_base")
_REDUCE_SCATTER_OPTIONS = _options("ReduceScatterOptions")  # a sum, as by default
_ALL_TO_ALL = _method("all_to_all_single", "alltoall_base")
_ALL_TO_ALL_OPTIONS = _options("AllToAllOptions")
_ALL_REDUCE = _method("allreduce")
_ALL_REDUCE_OPTIONS = _options("AllreduceOptions")  # a sum, as by default
_BROADCAST = _method("broadcast")


@functools.cache
def _broadcast_options(root: int) -> Any:
    return _options("BroadcastOptions", rootRank=root, rootTensor=0)


def all_gather(group: Any, output: torch.Tensor, sent: torch.Tensor) -> Any:
    """Fill `output` with the ranks' `sent`, in the order of the ranks. Both tensors must be contiguous."""
    if _ALL_GATHER and _ALL_GATHER_OPTIONS is not None and not sent.is_complex():
        return getattr(group, _ALL_GATHER)(output, sent, _ALL_GATHER_OPTIONS)
    assert all_gather_single is not None
    return all_gather_single(output, sent, group=group, async_op=True)


def broadcast(group: Any, tensor: torch.Tensor, root: int) -> Any:
    """Overwrite `tensor` with the tensor of the rank `root`, a rank within the group."""
    options = _broadcast_options(root)
    if _BROADCAST and options is not None and not tensor.is_complex():
        return group.broadcast([tensor], options)
    return dist.broadcast(tensor, group=group, group_src=root, async_op=True)


def reduce_scatter(group: Any, output: torch.Tensor, sent: torch.Tensor) -> Any:
    """Fill `output` with this rank's shard of the sum of all `sent`. Both tensors must be contiguous."""
    if _REDUCE_SCATTER and _REDUCE_SCATTER_OPTIONS is not None and not sent.is_complex():
        return getattr(group, _REDUCE_SCATTER)(output, sent, _REDUCE_SCATTER_OPTIONS)
    assert reduce_scatter_single is not None
    return reduce_scatter_single(output, sent, group=group, async_op=True)


def all_to_all(group: Any, output: torch.Tensor, sent: torch.Tensor) -> Any:
    """Send each rank an equal part of `sent`, and fill `output` with the parts received from the ranks."""
    if _ALL_TO_ALL and _ALL_TO_ALL_OPTIONS is not None and not sent.is_complex():
        return getattr(group, _ALL_TO_ALL)(output, sent, [], [], _ALL_TO_ALL_OPTIONS)
    return dist.all_to_all_single(output, sent, group=group, async_op=True)


def all_reduce(group: Any, tensor: torch.Tensor) -> Any:
    """Replace `tensor` with the sum of all ranks' tensors."""
    if _ALL_REDUCE and _ALL_REDUCE_OPTIONS is not None and not tensor.is_complex():
        return group.allreduce([tensor], _ALL_REDUCE_OPTIONS)
    return dist.all_reduce(tensor, group=group, async_op=True)
