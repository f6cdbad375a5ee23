"""Everything below the public names that a front end needs, and the only private door to the engine.

``lightning_shard`` and ``accelerate_shard`` import only the public names of :mod:`torch_shard` and the names in this package; a
front end of another framework would do the same. Checkpoints are in :mod:`torch_shard.frontend.checkpoint`, which is a module of
its own because it imports torch's distributed checkpoints. Unlike the public names, these may change in any release.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from ..comm import broadcast_buffers, consensus
from ..comm.collective_steps import each_rank
from ..comm.compressed_reduction import compressed
from ..comm.process_group_ops import reduce_scatter_single
from ..comm.process_groups import group_timeout
from ..comm.rendezvous import exchange_texts
from ..config.precision import for_autocast, precision_of
from ..engine import Engine
from ..errors import UnavailableError
from ..offload.memory_limits import available as free_host_bytes
from ..offload.memory_limits import formatted as format_bytes
from ..optim.checks import refusal_of
from ..optim.failed_steps import explained as explained_step
from ..optim.state_tree import copied as copy_tensors
from ..optim.state_tree import map_tensors, tensors_of
from ..plan.layer_selection import classes_named
from ..plan.run_report import Moment
from ..runtime import barrier, registry
from ..runtime.forward_hooks import unregister
from ..runtime.mixed_precision_hooks import cast, cast_outputs
from ..setup.lazy_param import Deferred, defer, deferred_of
from ..shard_tensor.spec import same_cut, shard_of_full
from ..shard_tensor.tensor import ShardTensor
from ..state import model_state as full_state
from ..state import optimizer_state as named_state
from ..state.model_state import WithMetadata
from ..state.param_names import names_of
from ..unit.module_params import copy_attributes
from ..utils.html_page import check_path as check_report_path
from .clipping import clip_norm, engines_over, limit_values
from .lone_files import read_alone, write_full_safetensors

__all__ = [
    "Deferred",
    "Moment",
    "WithMetadata",
    "abandon",
    "agree",
    "all_read",
    "any_rank",
    "broadcast_tensors",
    "cast",
    "cast_outputs",
    "casts_parameters",
    "check_report_path",
    "classes_named",
    "clip_norm",
    "compress_gradients",
    "copy_tensors",
    "defer",
    "deferred_of",
    "each_rank",
    "engine_holding",
    "engines_over",
    "exchange_texts",
    "explained_step",
    "for_autocast",
    "format_bytes",
    "free_host_bytes",
    "full_state_dict",
    "group_timeout",
    "in_batch",
    "is_parameter",
    "is_readable_alone",
    "is_solo",
    "limit_values",
    "load_optim_state_dict",
    "make_full",
    "map_tensors",
    "numbered_optim_state_dict",
    "own_buffers",
    "param_name",
    "param_names_of",
    "parameter_bytes",
    "plain_copy",
    "precision_of",
    "read_alone",
    "reading_alone",
    "refusal_of",
    "refuse_inside",
    "shard_like",
    "sharded_alike",
    "swap_value",
    "tensors_of",
    "wait_for_all",
    "with_shard",
    "word_remedies",
    "write_full_safetensors",
]


# -- what the ranks do together -----------------------------------------------------------------------------------------


def agree(engine: Engine, what: str, key: object = None, error: Exception | None = None) -> None:
    """Return when every rank is here, none has failed, and all have the same `key`; else raise on all. Collective."""
    consensus.agree(engine._runtime, what, key, error)


def all_read(engine: Engine, what: str, alone: bool = True) -> bool:
    """Return True if all ranks have come to `what`, which reads the model; False if the others do something else. Collective.

    This waits for late ranks. If `alone` is False, it is an error on all ranks if the others do something else.
    """
    with engine._runtime.lone.until_end():
        return consensus.met(engine._runtime, what, None, None, sure=True, alone=alone)


@contextlib.contextmanager
def reading_alone(engines: Sequence[Engine], what: str) -> Iterator[None]:
    """Let this rank alone read models inside, in one version: the other ranks' next steps wait. Not collective.

    It is for a rank for which :func:`all_read` has returned False.
    """
    with contextlib.ExitStack() as stack:
        for engine in engines:
            stack.enter_context(engine._runtime.lone.alone(what))
        yield


def is_readable_alone(engine: Engine, optimizer: Any) -> bool:
    """Return True if one rank alone can read all of an optimizer's state from the others. Not collective."""
    return named_state.is_readable_alone(engine._runtime, optimizer)


def any_rank(engine: Engine, what: str, value: bool) -> bool:
    """Return True if `value` is true on any rank. Collective."""
    return consensus.any_rank(engine._runtime, what, value)


def broadcast_tensors(engine: Engine, tensors: list[torch.Tensor], what: str) -> None:
    """Overwrite tensors on the engine's device with rank 0's values. Collective."""
    broadcast_buffers.broadcast_coalesced(engine._runtime.collectives, tensors, what)


@contextlib.contextmanager
def in_batch(engine: Engine, batch: str) -> Iterator[None]:
    """Make the ranks compare the description `batch` in each forward inside, beside what they compare anyway. Not collective.

    Where the descriptions differ, the ranks raise a DivergenceError that quotes both.
    """
    operations = engine._runtime.operations
    operations.batch = batch
    try:
        yield
    finally:
        operations.batch = ""


def is_solo(engine: Engine) -> bool:
    """Return True inside ``engine.gathered(ranks=...)``, where a forward is this rank's own. Not collective."""
    return bool(engine._runtime.solo)


def wait_for_all(engine: Engine, seconds: float, what: str) -> None:
    """Wait until all ranks have reached `what`, for `seconds` at least; in a backward return at once. Collective."""
    barrier.wait_for_all(engine._runtime, seconds, what)


@contextlib.contextmanager
def own_buffers(engine: Engine) -> Iterator[None]:
    """Leave each rank its own buffers in the forwards inside, and later ones up to the next that trains. Not collective."""
    runtime = engine._runtime
    sync, runtime.buffers = runtime.buffers, None
    try:
        yield
    finally:
        runtime.buffers = sync
        if sync is not None:
            sync.due = False


# -- models -------------------------------------------------------------------------------------------------------------


def compress_gradients(engine: Engine, dtype: torch.dtype) -> None:
    """Register a communication hook that sends gradients in `dtype`, a float of 16 bits. Collective with several ranks.

    Raises:
        ConfigError, UnitStateError: as :meth:`Engine.register_comm_hook`.
        UnavailableError: this build of torch has no reduce-scatter.
    """
    if reduce_scatter_single is None:
        raise UnavailableError(
            "a communication hook that compresses gradients needs torch.distributed with reduce_scatter."
        )
    if engine.world_size > 1:
        engine.register_comm_hook((engine.shard_group, dtype), compressed)


def word_remedies(engine: Engine, handle: str, saving: str) -> None:
    """Make errors of the engine name remedies in the user's terms. Not collective.

    Args:
        engine: the engine.
        handle: the user's expression for it, before ``.gathered(...)``.
        saving: how full values are saved, in whole sentences, for errors about pickling shards.
    """
    watchdog = engine._runtime.collectives.watchdog
    watchdog.handle, watchdog.saving_advice = handle, saving


def abandon(engine: Engine) -> None:
    """Take the engine off its model, whose parameters stay this rank's shards and can't be computed with. Not collective."""
    engine._abandon()


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
    """Return the bytes of the sharded parameters in full, in the dtypes in which they are stored. Not collective."""
    return sum(
        flat.layout.numel * flat.shard.element_size() for unit in engine.units if unit.gathers for flat in unit.flats
    )


def plain_copy(engine: Engine, module: nn.Module, values: Mapping[str, Any]) -> nn.Module:
    """Return a copy of a part of the sharded model without the engine. Not collective.

    The parameters and persistent buffers of the copy are over the memory of `values`, full tensors by the names of the whole
    model. A parameter without a value is a KeyError.
    """
    runtime, model = engine._runtime, engine.model
    memo: dict[int, Any] = {id(part): part for part in (runtime, *runtime.units)}  # the hooks refer to these
    held = {id(p) for p in module.parameters()}
    for name, p in model.named_parameters(remove_duplicate=False):
        if id(p) in held:
            memo[id(p)] = nn.Parameter(values[name], requires_grad=p.requires_grad)
    for name, buffer in model.named_buffers(remove_duplicate=False):
        if name in values:
            memo[id(buffer)] = values[name]
    found = copy.deepcopy(module, memo)
    unregister(found, ())
    return found


def refuse_inside(engine: Engine, what: str) -> None:
    """Raise a UnitStateError inside a forward or ``engine.gathered()``. Not collective."""
    full_state.refuse_inside(engine._runtime, what)


# -- shards -------------------------------------------------------------------------------------------------------------


def is_parameter(tensor: torch.Tensor) -> bool:
    """Return True for a sharded parameter of an engine, False for copies of one, its gradient and optimizer state."""
    return isinstance(tensor, ShardTensor) and tensor._unit_ref is not None


def param_name(shard: ShardTensor) -> str:
    """Return the name of the parameter that `shard` is sharded like."""
    return shard._spec.name


def full_state_dict(engine: Engine, module: Any, rank0_only: bool) -> dict[str, Any]:
    """Return the full state dict, on the CPU, of `module`: the sharded model, or a part of it. Collective."""
    return full_state.state_dict(module, engine._runtime, rank0_only)


def make_full(
    engine: Engine, found: dict[str, Any], rank0_only: bool, what: str, error: Exception | None = None
) -> None:
    """Put full tensors, on the CPU, in the place of shards in a state dict. Collective; see ``state.model_state.make_full``."""
    full_state.make_full(engine._runtime, found, rank0_only, True, what, error)


def shard_like(full: Any, like: ShardTensor) -> ShardTensor:
    """Return this rank's shard, in new memory, of a full tensor that is sharded as `like` is. Not collective."""
    return ShardTensor(shard_of_full(full.detach(), like._spec).to(like.device, copy=True), like._spec)


def sharded_alike(a: ShardTensor, b: ShardTensor) -> bool:
    """Return True if the shards of both hold the same elements on each rank. Not collective."""
    return same_cut(a._spec, b._spec)


def swap_value(param: Any, value: torch.Tensor, requires_grad: bool) -> None:
    """Make `value`, sharded or plain, the data of a parameter: the same object, with the attributes that users gave it."""
    with torch.no_grad():
        other = nn.Parameter(value, requires_grad=requires_grad)
    copy_attributes(param, other)
    torch.utils.swap_tensors(param, other)


def with_shard(like: ShardTensor, local: torch.Tensor) -> ShardTensor:
    """Return a tensor that is sharded as `like` is, and of which `local` is this rank's shard."""
    return ShardTensor(local, like._spec)


# -- optimizers ---------------------------------------------------------------------------------------------------------


def load_optim_state_dict(engine: Engine, optimizer: Any, state_dict: Mapping[str, Any], model: Any) -> None:
    """Load full state by the names of parameters in `model`. Collective."""
    named_state.load_optim_state_dict(engine._runtime, optimizer, state_dict, model)  # type: ignore[arg-type]


def numbered_optim_state_dict(engine: Engine, optimizer: Any, rank0_only: bool, model: Any) -> dict[str, Any]:
    """Return the full state of an optimizer by number, as a plain optimizer's ``state_dict()`` is. Collective.

    State of no parameter comes first. With `rank0_only`, ranks other than 0 get an empty dict.
    """
    named = named_state.optim_state_dict(engine._runtime, optimizer, rank0_only, model)
    if not named:
        return {}
    names = param_names_of(engine, optimizer, model)
    held = [p for group in optimizer.param_groups for p in group["params"]]
    number_of = {names[id(p)]: number for number, p in enumerate(held)}
    state = {key: entries for key, entries in named["state"].items() if key not in number_of}
    state.update((number, named["state"][name]) for name, number in number_of.items() if name in named["state"])
    groups = []
    for group in named["param_groups"]:
        params = [number_of[name] for name in group.pop("params")]
        groups.append({**group, "params": params})  # the last entry, as in a plain optimizer's
    return {"state": state, "param_groups": groups}


def param_names_of(engine: Engine, optimizer: Any, model: Any) -> dict[int, str]:
    """Return the name in `model` of each of the optimizer's parameters, by id; a StateDictError if one has none."""
    return names_of(engine._runtime, optimizer, model)
