"""Everything below the public names that a front end needs, and the only private door to the engine.

``lightning_shard`` and ``accelerate_shard`` import the public names of :mod:`torch_shard` and what stands here, nothing else;
a front end of another framework would do the same. Checkpoints are in :mod:`torch_shard.frontend.checkpoint`, which is a
module of its own because it imports torch's distributed checkpoints. Unlike the public names, these may change in any release.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from ..comm import broadcast_buffers, consensus
from ..comm.broadcast_buffers import broadcast_coalesced
from ..comm.process_group_ops import reduce_scatter_single
from ..comm.process_groups import group_timeout
from ..comm.rendezvous import told_by
from ..comm.traffic_statistics import Statistics
from ..comm.work import default_store
from ..config.precision import for_autocast, precision_of
from ..config.shard_config import Strategy
from ..engine import Engine
from ..offload.memory_limits import available as free_host_bytes
from ..offload.memory_limits import formatted as format_bytes
from ..optim.checks import refusal_of
from ..optim.matrix import state as owned_state
from ..plan.layer_selection import classes_named
from ..runtime import barrier as meeting
from ..runtime.mixed_precision_hooks import cast, cast_outputs
from ..runtime.runtime import Runtime
from ..setup.lazy_param import Deferred, defer, deferred_of
from ..shard_tensor.spec import same_cut, slice_full
from ..shard_tensor.state import STATE
from ..shard_tensor.tensor import ShardTensor
from ..state import model_state as full_state
from ..state import optimizer_state as named_state
from ..state.model_state import make_whole
from ..unshard.gathered import gathered
from ..utils.weak_id_map import ByObject
from . import clipping as clip_together
from .clipping import clip_norm, engines_over, limit_values

__all__ = [
    "ByObject",
    "Deferred",
    "Runtime",
    "Statistics",
    "Strategy",
    "abandon",
    "agree",
    "anywhere",
    "broadcast_coalesced",
    "broadcast_tensors",
    "cast",
    "cast_outputs",
    "classes_named",
    "clip_norm",
    "clip_together",
    "default_store",
    "defer",
    "deferred_of",
    "engines_over",
    "for_autocast",
    "format_bytes",
    "free_host_bytes",
    "full_state",
    "gathered",
    "group_timeout",
    "in_batch",
    "is_parameter",
    "is_solo",
    "limit_values",
    "load_optim_state_dict",
    "make_whole",
    "meet",
    "meeting",
    "named_state",
    "optim_state_dict",
    "owned_state",
    "param_name",
    "param_names_of",
    "precision_of",
    "reduce_scatter_single",
    "refusal_of",
    "refuse_inside",
    "same_cut",
    "shard_like",
    "sharded_alike",
    "slice_full",
    "swap_value",
    "told_by",
    "with_shard",
]


def _runtime(engine: Engine | Runtime) -> Runtime:
    return engine if isinstance(engine, Runtime) else engine._runtime


# -- what the ranks do together -----------------------------------------------------------------------------------------


def agree(engine: Engine | Runtime, what: str, key: object = None, error: Exception | None = None) -> None:
    """Return when every rank is here, none has failed, and all have the same `key`; else raise on all. Collective."""
    consensus.agree(_runtime(engine), what, key, error)


def anywhere(engine: Engine | Runtime, what: str, value: bool) -> bool:
    """Return True if `value` is true on any rank. Collective."""
    return consensus.anywhere(_runtime(engine), what, value)


def broadcast_tensors(engine: Engine, tensors: list[torch.Tensor], what: str) -> None:
    """Overwrite tensors on the engine's device with rank 0's values. Collective."""
    broadcast_buffers.broadcast_coalesced(engine._runtime.collectives, tensors, what)


@contextlib.contextmanager
def in_batch(engine: Engine, batch: str) -> Iterator[None]:
    """Inside, have the ranks compare `batch` in each forward with what they compare anyway. Not collective.

    Ranks whose batches have another description get a DivergenceError that quotes both.
    """
    agreement = engine._runtime.agreement
    if agreement is None:  # a single rank
        yield
        return
    agreement.batch = batch
    try:
        yield
    finally:
        agreement.batch = ""


def is_solo(engine: Engine) -> bool:
    """Return True inside ``engine.gathered(ranks=...)``, where a forward is this rank's own. Not collective."""
    return bool(engine._runtime.solo)


def meet(engine: Engine | Runtime, seconds: float, what: str) -> None:
    """Wait until all ranks are in `what`, for `seconds` at least; in a forward or a backward return at once. Collective."""
    meeting.meet(_runtime(engine), seconds, what)


# -- models -------------------------------------------------------------------------------------------------------------


def abandon(engine: Engine) -> None:
    """Take the engine off its model, whose parameters stay this rank's shards and can't be computed with. Not collective."""
    engine._abandon()


def refuse_inside(engine: Engine | Runtime, what: str) -> None:
    """Raise a UnitStateError inside a forward or ``engine.gathered()``. Not collective."""
    full_state.refuse_inside(_runtime(engine), what)


# -- shards -------------------------------------------------------------------------------------------------------------


def is_parameter(tensor: torch.Tensor) -> bool:
    """Return True for a sharded parameter of an engine, False for copies of one, its gradient and optimizer state."""
    return isinstance(tensor, ShardTensor) and tensor._unit_ref is not None


def param_name(shard: ShardTensor) -> str:
    """Return the name of the parameter that `shard` is sharded like."""
    return shard._spec.name


def shard_like(full: Any, like: ShardTensor) -> ShardTensor:
    """Return this rank's shard, in new memory, of a full tensor that is sharded as `like` is. Not collective."""
    return ShardTensor(slice_full(full.detach(), like._spec).to(like.device, copy=True), like._spec)


def sharded_alike(a: ShardTensor, b: ShardTensor) -> bool:
    """Return True if the shards of both hold the same elements on each rank. Not collective."""
    return same_cut(a._spec, b._spec)


def swap_value(param: Any, value: torch.Tensor, requires_grad: bool) -> None:
    """Make `value`, sharded or plain, the data of a parameter: the same object, with the attributes that users gave it."""
    with torch.no_grad():
        other = nn.Parameter(value, requires_grad=requires_grad)
    own = {STATE, "_is_param"}
    other.__dict__.update({name: value for name, value in param.__dict__.items() if name not in own})
    torch.utils.swap_tensors(param, other)


def with_shard(like: ShardTensor, local: torch.Tensor) -> ShardTensor:
    """Return a tensor that is sharded as `like` is, and of which `local` is this rank's shard."""
    return ShardTensor(local, like._spec)


# -- optimizers ---------------------------------------------------------------------------------------------------------


def load_optim_state_dict(engine: Engine | Runtime, optimizer: Any, state_dict: Mapping[str, Any], model: Any) -> None:
    """Load full state by the names of parameters in `model`. Collective."""
    named_state.load_optim_state_dict(_runtime(engine), optimizer, state_dict, model)  # type: ignore[arg-type]


def optim_state_dict(engine: Engine, optimizer: Any, rank0_only: bool, model: Any) -> dict[str, Any]:
    """Return the full state of an optimizer by the names of parameters in `model`. Collective."""
    return named_state.optim_state_dict(engine._runtime, optimizer, rank0_only, model)


def param_names_of(engine: Engine, optimizer: Any, model: Any) -> dict[int, str]:
    """Return the name in `model` of each of the optimizer's parameters, by id; a StateDictError if one has none."""
    return named_state.names_of(engine._runtime, optimizer, model)
