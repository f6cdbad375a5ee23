"""Everything below the public names that a front end needs, and the only private door to the engine.

``lightning_shard`` and ``accelerate_shard`` import the public names of :mod:`torch_shard` and what stands here, nothing else;
a front end of another framework would do the same. Checkpoints are in :mod:`torch_shard.frontend.checkpoint`, which is a
module of its own because it imports torch's distributed checkpoints. Unlike the public names, these may change in any release.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from ..comm import consensus
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
from ..optim.checks import refusal_of
from ..optim.matrix.state import copied as copy_tensors
from ..optim.matrix.state import mapped as map_tensors
from ..optim.matrix.state import tensors_of
from ..plan.layer_selection import classes_named
from ..runtime import barrier as meeting
from ..runtime import registry
from ..runtime.mixed_precision_hooks import cast, cast_outputs
from ..runtime.runtime import Runtime
from ..setup.lazy_param import Deferred, defer, deferred_of
from ..shard_tensor.spec import same_cut, slice_full
from ..shard_tensor.tensor import ShardTensor
from ..state import model_state as full_state
from ..state import optimizer_state as named_state
from ..state.model_state import WithMetadata
from ..state.optimizer_state import OTHER as OTHER_STATE
from ..utils.weak_id_map import ByObject
from .clipping import clip_norm, engines_over, limit_values

__all__ = [
    "OTHER_STATE",
    "ByObject",
    "Deferred",
    "Statistics",
    "Strategy",
    "WithMetadata",
    "agree",
    "anywhere",
    "broadcast_coalesced",
    "cast",
    "cast_outputs",
    "casts_parameters",
    "classes_named",
    "clip_norm",
    "copy_tensors",
    "default_store",
    "defer",
    "deferred_of",
    "engine_holding",
    "engines_over",
    "for_autocast",
    "free_host_bytes",
    "full_state_dict",
    "group_timeout",
    "limit_values",
    "load_optim_state_dict",
    "make_full",
    "map_tensors",
    "meet",
    "named_state",
    "optim_state_dict",
    "param_names_of",
    "parameter_bytes",
    "precision_of",
    "reduce_scatter_single",
    "refusal_of",
    "refuse_inside",
    "same_cut",
    "shard_like",
    "slice_full",
    "tensors_of",
    "told_by",
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


def meet(engine: Engine | Runtime, seconds: float, what: str) -> None:
    """Wait until all ranks are in `what`, for `seconds` at least; in a forward or a backward return at once. Collective."""
    meeting.meet(_runtime(engine), seconds, what)


# -- models -------------------------------------------------------------------------------------------------------------


def engine_holding(module: nn.Module) -> Engine | None:
    """Return the engine whose shards `module` holds now: the sharded model, a part of it, or a module around it.

    None if it holds none, as inside ``engine.gathered()``, where parameters are full. Not collective.
    """
    found: Engine | None = registry.engine_holding(module)
    return found


def casts_parameters(engine: Engine) -> bool:
    """Return True if a unit is gathered in another dtype than its parameters are stored in. Not collective."""
    return any(unit.casts for unit in engine.units)


def parameter_bytes(engine: Engine) -> int:
    """Return how many bytes the full parameters take, of those that are sharded, as they are stored. Not collective."""
    return sum(
        flat.layout.numel * flat.shard.element_size() for unit in engine.units if unit.gathers for flat in unit.flats
    )


def refuse_inside(engine: Engine | Runtime, what: str) -> None:
    """Raise a UnitStateError inside a forward or ``engine.gathered()``. Not collective."""
    full_state.refuse_inside(_runtime(engine), what)


def full_state_dict(engine: Engine, module: Any, rank0_only: bool) -> dict[str, Any]:
    """Return the full state dict, on the CPU, of `module`: the sharded model, or a part of it. Collective."""
    return full_state.state_dict(module, engine._runtime, rank0_only)


def make_full(
    engine: Engine, found: dict[str, Any], rank0_only: bool, what: str, error: Exception | None = None
) -> None:
    """Put full tensors, on the CPU, in the place of shards in a state dict. Collective; see ``full_state.make_whole``."""
    full_state.make_whole(engine._runtime, found, rank0_only, True, what, error)


def shard_like(full: Any, like: ShardTensor) -> ShardTensor:
    """Return this rank's shard, in new memory, of a full tensor that is sharded as `like` is. Not collective."""
    return ShardTensor(slice_full(full.detach(), like._spec).to(like.device, copy=True), like._spec)


# -- optimizers ---------------------------------------------------------------------------------------------------------


def param_names_of(engine: Engine, optimizer: Any, model: Any) -> dict[int, str]:
    """Return the name in `model` of each of the optimizer's parameters, by id; a StateDictError if one has none."""
    return named_state.names_of(engine._runtime, optimizer, model)


def optim_state_dict(engine: Engine, optimizer: Any, rank0_only: bool, model: Any) -> dict[str, Any]:
    """Return the full state of an optimizer by the names of parameters in `model`. Collective."""
    return named_state.optim_state_dict(engine._runtime, optimizer, rank0_only, model)


def load_optim_state_dict(engine: Engine | Runtime, optimizer: Any, state_dict: Mapping[str, Any], model: Any) -> None:
    """Load full state by the names of parameters in `model`. Collective."""
    named_state.load_optim_state_dict(_runtime(engine), optimizer, state_dict, model)  # type: ignore[arg-type]
