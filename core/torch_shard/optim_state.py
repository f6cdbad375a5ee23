"""Conversions of optimizer state, under the names that torch's FullyShardedDataParallel gives its functions.

For saving there are two forms with the parameters' names as keys: *full* (full tensors on the CPU) and *sharded* (ShardTensors of
global shape, which torch.distributed.checkpoint saves and loads). For loading there is one with numbers as keys: the dict that
``optimizer.load_state_dict`` takes, with this rank's shards. A plain optimizer's state dict is full state by number, and
:func:`rekey_optim_state_dict` converts names to numbers and back. So plain state can be loaded here, and full state into a plain
optimizer::

    full = optim_state.full_optim_state_dict(model, optimizer)  # on rank 0
    plain = optim_state.rekey_optim_state_dict(full, OptimStateKeyType.PARAM_ID, model, optim=optimizer)

Unlike in torch, parameters may have any dtypes, all forms can be had with and without `rank0_only`, and `model` is the sharded
module itself. Parameters without state have no entry. State that is neither a tensor of the parameter's shape nor a number (a
list, say) is kept as it is.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn

from .comm.collective_steps import broadcast, each
from .engine import Engine, engine_of
from .errors import ConfigError, StateDictError
from .optim import state_tree
from .optim.engines_of_optimizer import params_of
from .optim.matrix import state as matrix_state
from .optim.registry import counters_in
from .state import optimizer_state
from .state.model_state import copied
from .state.param_names import names_by_id, names_of

__all__ = [
    "OptimStateKeyType",
    "flatten_sharded_optim_state_dict",
    "full_optim_state_dict",
    "optim_state_dict",
    "optim_state_dict_to_load",
    "rekey_optim_state_dict",
    "scatter_full_optim_state_dict",
    "shard_full_optim_state_dict",
    "sharded_optim_state_dict",
]

_Input = list[dict[str, Any]] | Iterable[nn.Parameter] | None


class OptimStateKeyType(enum.Enum):
    """The keys of a state dict: names or numbers of parameters. The functions also take torch's own enumeration."""

    PARAM_NAME = 1
    PARAM_ID = 2


# -- for saving -------------------------------------------------------------------------------------------------------


def full_optim_state_dict(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    optim_input: _Input = None,
    rank0_only: bool = True,
    group: Any = None,
) -> dict[str, Any]:
    """Return full optimizer state by parameter name, on the CPU. Collective.

    Args:
        model: a sharded model.
        optim: an optimizer over its parameters.
        optim_input: ignored, because `optim` has the parameters.
        rank0_only: the other ranks get an empty dict.
        group: ignored, because the model has its process group.

    Returns:
        ``{"state": {name: {...}}, "param_groups": [{..., "params": [names]}]}``.

    Raises:
        ConfigError: `model` is not sharded.
        StateDictError: `optim` holds a parameter that is not in `model`.
    """
    engine = _engine(model, "full_optim_state_dict")
    return engine.optim_state_dict(optim, rank0_only=rank0_only)


def sharded_optim_state_dict(model: nn.Module, optim: torch.optim.Optimizer, group: Any = None) -> dict[str, Any]:
    """Return optimizer state by parameter name, as ShardTensors where it has the parameter's shape. Collective.

    The tensors are copies, on the CPU. The state of optimizers that step on full matrices is sent by the ranks that own
    it, one parameter at a time, and each rank keeps its shards. State of other shapes is full on every rank.

    Arguments and errors are those of :func:`full_optim_state_dict`.
    """
    what = "sharded_optim_state_dict"
    return _sharded(_engine(model, what), optim, None, what)


def _sharded(
    engine: Engine, optim: torch.optim.Optimizer, given: dict[str, Any] | None, what: str, offload: bool = True
) -> dict[str, Any]:
    def take() -> tuple[list[str], dict[str, Any]]:
        names = _by_number(engine, optim)
        return names, optimizer_state.complete(optim.state_dict() if given is None else given, what, engine.rank)

    names, taken = each(engine._runtime, what, take, key=lambda found: found[0])
    keep = _shards_of(optim)
    state = matrix_state.collect(engine._runtime, taken["state"], len(names), what, keep)
    if engine.world_size == 1 and matrix_state.is_matrix(engine._runtime, optim):
        state = {number: keep(number, own) if number in range(len(names)) else own for number, own in state.items()}
    state = state_tree.map_tensors(state, lambda tensor: copied(tensor, offload))
    return _renamed({**taken, "state": state}, dict(enumerate(names)), what, engine.rank)


def optim_state_dict(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    optim_state_dict: dict[str, Any] | None = None,
    group: Any = None,
) -> dict[str, Any]:
    """Return optimizer state by parameter name, in the form that :mod:`torch_shard.state_dict_type` sets. Collective.

    By default it is full, on every rank and on the CPU.

    Args:
        model: a sharded model.
        optim: an optimizer over its parameters.
        optim_state_dict: a dict to convert in place of ``optim.state_dict()``: by number, with plain tensors or ShardTensors.
        group: ignored.

    The result and errors are those of :func:`full_optim_state_dict`, or of :func:`sharded_optim_state_dict` if
    ``SHARDED_STATE_DICT`` or ``LOCAL_STATE_DICT`` is set.
    """
    what = "optim_state_dict"
    engine = _engine(model, what)
    settings = engine._runtime.state_dict_settings
    if settings is not None and settings.state_dict_type.name != "FULL_STATE_DICT":
        return _sharded(engine, optim, optim_state_dict, what, settings.optim_state_dict_config.offload_to_cpu)
    rank0_only = settings is not None and settings.optim_state_dict_config.rank0_only
    return optimizer_state.optim_state_dict(engine._runtime, optim, rank0_only, model, optim_state_dict)


# -- for loading ------------------------------------------------------------------------------------------------------


def optim_state_dict_to_load(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    optim_state_dict: dict[str, Any],
    is_named_optimizer: bool = False,
    load_directly: bool = False,
    group: Any = None,
) -> dict[str, Any]:
    """Convert state of any form to the form that ``optim.load_state_dict`` takes. Collective.

    Args:
        model: a sharded model.
        optim: an optimizer over its parameters, with the groups that were saved.
        optim_state_dict: state by name or by number, on every rank, with full tensors, ShardTensors sharded like the
            parameters, or the ShardedTensors of torch's ``load_sharded_optimizer_state_dict``. With ``rank0_only`` set
            (:mod:`torch_shard.state_dict_type`) only rank 0's is read.
        is_named_optimizer: ignored, because the dict itself shows it.
        load_directly: True to load the result, too.
        group: ignored.

    Returns:
        A dict by number with this rank's shards, in new memory.

    Raises:
        StateDictError: on all ranks, with everything that does not fit; nothing has been changed.
        ConfigError: `model` is not sharded.
    """
    what = "optim_state_dict_to_load"
    engine = _engine(model, what)
    settings = engine._runtime.state_dict_settings
    if settings is not None and getattr(settings.optim_state_dict_config, "rank0_only", False):
        result = scatter_full_optim_state_dict(optim_state_dict, model, optim=optim)
    else:
        result = _to_load(engine, optim, optim_state_dict, what)
    if load_directly:
        optimizer_state.load_by_number(optim, result)
    return result


def shard_full_optim_state_dict(
    full_optim_state_dict: dict[str, Any],
    model: nn.Module,
    optim_input: _Input = None,
    optim: torch.optim.Optimizer | None = None,
) -> dict[str, Any]:
    """Convert full state that every rank has to the form that ``optim.load_state_dict`` takes. Collective.

    Args:
        full_optim_state_dict: full tensors by name, or by number.
        model: a sharded model.
        optim_input: without `optim`, the parameters or groups that it was made from; by default ``model.parameters()``.
        optim: an optimizer over the model's parameters.

    The result and errors are those of :func:`optim_state_dict_to_load`.
    """
    engine = _engine(model, "shard_full_optim_state_dict")
    optim = _over(optim, optim_input, model)
    return _to_load(engine, optim, full_optim_state_dict, "shard_full_optim_state_dict")


def flatten_sharded_optim_state_dict(
    sharded_optim_state_dict: dict[str, Any], model: nn.Module, optim: torch.optim.Optimizer
) -> dict[str, Any]:
    """Convert the state of :func:`sharded_optim_state_dict` to the form that ``optim.load_state_dict`` takes. Collective.

    The result and errors are those of :func:`optim_state_dict_to_load`.
    """
    engine = _engine(model, "flatten_sharded_optim_state_dict")
    return _to_load(engine, optim, sharded_optim_state_dict, "flatten_sharded_optim_state_dict")


def scatter_full_optim_state_dict(
    full_optim_state_dict: dict[str, Any] | None,
    model: nn.Module,
    optim_input: _Input = None,
    optim: torch.optim.Optimizer | None = None,
    group: Any = None,
) -> dict[str, Any]:
    """Convert full state that rank 0 has to the form that ``optim.load_state_dict`` takes on every rank. Collective.

    Rank 0 sends the state of one parameter at a time, so another rank holds its shards and the full state of one parameter.

    Args:
        full_optim_state_dict: full tensors by name or by number on rank 0. The argument of other ranks is ignored.
        model: a sharded model.
        optim_input: without `optim`, the parameters or groups that it was made from; by default ``model.parameters()``.
        optim: an optimizer over the model's parameters.
        group: ignored.

    The result and errors are those of :func:`optim_state_dict_to_load`.
    """
    what = "scatter_full_optim_state_dict"
    engine = _engine(model, what)
    optim = _over(optim, optim_input, model)
    runtime = engine._runtime

    def take() -> tuple[list[str], dict[str, Any]]:
        names = _by_number(engine, optim)
        if engine.rank:
            return names, {"state": {}, "param_groups": []}
        given = _named(engine, optim, optimizer_state.complete(full_optim_state_dict, what, 0), what)
        return names, _renamed(given, {name: number for number, name in enumerate(names)}, what, 0)

    names, numbered = each(runtime, what, take, key=lambda found: found[0])
    keep, count = _shards_of(optim), len(names)
    # State of no parameter, and of parameters that have none.
    own = {key: value for key, value in numbered["state"].items() if key not in range(count) or not value}
    groups, own = broadcast(runtime, (numbered["param_groups"], own), what)
    state = {number: entries for number, entries in numbered["state"].items() if number not in own}
    if engine.world_size > 1:
        state = dict(matrix_state.collect(runtime, state, count, what, keep))
    received = {"state": {**state, **own}, "param_groups": groups}
    return _to_load(engine, optim, _renamed(received, dict(enumerate(names)), what, engine.rank), what)


def _shards_of(optim: torch.optim.Optimizer) -> Callable[[int, Any], Any]:
    params = params_of(optim)

    def keep(number: int, entries: Mapping[str, Any]) -> dict[str, Any]:
        counters = counters_in([(params[number], entries)])
        return {key: optimizer_state.own_shard(params[number], key, value, counters) for key, value in entries.items()}

    return keep


# -- names and numbers --------------------------------------------------------------------------------------------------


def rekey_optim_state_dict(
    optim_state_dict: dict[str, Any],
    optim_state_key_type: Any,
    model: nn.Module,
    optim_input: _Input = None,
    optim: torch.optim.Optimizer | None = None,
) -> dict[str, Any]:
    """Return a state dict with names of parameters in place of numbers, or numbers in place of names. Not collective.

    Args:
        optim_state_dict: state by name or by number. Its tensors are not copied.
        optim_state_key_type: the keys of the result, an :class:`OptimStateKeyType` or torch's.
        model: a sharded or plain model.
        optim_input: without `optim`, the parameters or groups that it was made from; by default ``model.parameters()``.
        optim: the optimizer. Numbers follow the order of its groups.

    Raises:
        ConfigError: the key type is another.
        StateDictError: a parameter is not in `model`, the dict has no groups, or they have an unknown parameter.
    """
    what = "rekey_optim_state_dict"
    kind = getattr(optim_state_key_type, "name", None)
    if kind not in OptimStateKeyType.__members__:
        raise ConfigError(f"{what}: optim_state_key_type must be an OptimStateKeyType, not {optim_state_key_type!r}.")
    params = params_of(_over(optim, optim_input, model))
    engine = engine_of(model)
    optimizer_state.complete(optim_state_dict, what, 0 if engine is None else engine.rank)
    known = names_by_id(() if engine is None else engine.units, model)
    if any(id(p) not in known for p in params):
        raise StateDictError(f"{what}: the optimizer holds parameters that are not in the model.")
    names = [known[id(p)] for p in params]
    given: Iterable[Any] = names if _listed(optim_state_dict) <= set(names) else range(len(names))
    wanted: Iterable[Any] = names if kind == "PARAM_NAME" else range(len(names))
    mapping = dict(zip(given, wanted, strict=True))
    return _renamed(optim_state_dict, mapping, what, 0 if engine is None else engine.rank)


def _listed(state_dict: Mapping[str, Any]) -> set[Any]:
    """Return the keys of the parameters that the groups of a state dict list."""
    return {key for group in state_dict["param_groups"] for key in group["params"]}


def _renamed(state_dict: Mapping[str, Any], mapping: Mapping[Any, Any], what: str, rank: int) -> dict[str, Any]:
    unknown = [k for group in state_dict["param_groups"] for k in group["params"] if k not in mapping]
    if unknown:
        raise StateDictError(
            f"rank {rank}: {what}: the optimizer has no parameter {', '.join(map(repr, unknown[:5]))}, which the dict's "
            "groups list. Make the optimizer with the groups that were saved."
        )
    listed = _listed(state_dict)
    other = [key for key in state_dict["state"] if key not in listed]
    result = {
        "state": {mapping[key] if key in listed else key: value for key, value in state_dict["state"].items()},
        "param_groups": [
            {**group, "params": [mapping[key] for key in group["params"]]} for group in state_dict["param_groups"]
        ],
    }
    return {**result, optimizer_state.OTHER: other} if other else result


def _by_number(engine: Engine, optim: torch.optim.Optimizer) -> list[str]:
    names = names_of(engine._runtime, optim, engine.model)
    return [names[id(p)] for p in params_of(optim)]


def _named(engine: Engine, optim: torch.optim.Optimizer, given: Mapping[str, Any], what: str) -> dict[str, Any]:
    """Return state by name, from state by name or by number."""
    names = _by_number(engine, optim)
    if _listed(optimizer_state.complete(given, what, engine.rank)) <= set(names):
        return dict(given)
    return _renamed(given, dict(enumerate(names)), what, engine.rank)


# -- shared -----------------------------------------------------------------------------------------------------------


def _to_load(engine: Engine, optim: torch.optim.Optimizer, given: Mapping[str, Any], what: str) -> dict[str, Any]:
    def take() -> tuple[dict[str, Any], list[tuple[str, Any]]]:
        named = _named(engine, optim, given, what)
        return named, [(name, key) for name, own in named["state"].items() for key in own if _is_chunked(own[key])]

    named, chunked = each(engine._runtime, what, take, key=lambda found: found[1])
    if chunked:
        named = _with_shards(engine, optim, named, chunked, what)
    return optimizer_state.optim_state_dict_to_load(engine._runtime, optim, named, engine.model, what)


def _is_chunked(value: Any) -> bool:
    """Return True for a ShardedTensor of torch's, which its ``load_sharded_optimizer_state_dict`` makes: a chunk on each rank."""
    return isinstance(value, torch.Tensor) and hasattr(value, "local_shards")


def _with_shards(
    engine: Engine, optim: torch.optim.Optimizer, named: dict[str, Any], chunked: list[tuple[str, Any]], what: str
) -> dict[str, Any]:
    """Return state by name with this rank's shards in place of its `chunked` entries, each gathered by itself. Collective."""
    numbers = {name: number for number, name in enumerate(_by_number(engine, optim))}
    state, keep = {name: dict(own) for name, own in named["state"].items()}, _shards_of(optim)
    c, found, wanted = engine._runtime.collectives, 0, 0
    for name, key in chunked:
        value = state[name][key]
        full = torch.zeros(value.size(), dtype=value.dtype, device="cpu")
        wanted += full.numel()
        for chunk in value.local_shards():
            at = zip(chunk.metadata.shard_offsets, chunk.metadata.shard_sizes, strict=True)
            full[tuple(slice(start, start + size) for start, size in at)] = chunk.tensor
            found += chunk.tensor.numel()
        # The sum over bytes is exact, since all ranks but one add zeros.
        c.all_ranks.all_reduce(full.view(-1).view(torch.uint8), "sum", what)
        state[name][key] = keep(numbers[name], {key: full})[key] if name in numbers else full
    if int(c.all_ranks.all_reduce(torch.tensor(found, device="cpu"), "sum", what)) != wanted:
        raise StateDictError(
            f"rank {engine.rank}: {what}: the ShardedTensors have chunks on other ranks than the model's. Read the checkpoint on "
            "the model's ranks, with torch.distributed.checkpoint.state_dict or engine.load."
        )
    return {**named, "state": state}


def _engine(model: nn.Module, what: str) -> Engine:
    engine = engine_of(model)
    if engine is None:
        raise ConfigError(
            f"{what}: the model is not sharded; use the optimizer's own state_dict() and load_state_dict()."
        )
    return engine


def _over(optim: torch.optim.Optimizer | None, optim_input: _Input, model: nn.Module) -> torch.optim.Optimizer:
    """Return `optim`, or without one, as torch does, an optimizer over `optim_input`, by default over all parameters."""
    if optim is not None:
        return optim
    return torch.optim.Optimizer(model.parameters() if optim_input is None else optim_input, {})
