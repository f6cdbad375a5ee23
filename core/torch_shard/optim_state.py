"""Optimizer state in other forms, under the names that torch's FullyShardedDataParallel gives its functions.

Two forms by name, for saving: *full* (whole tensors on the CPU) and *sharded* (ShardTensors of global shape, which
torch.distributed.checkpoint saves and loads). One by number, for loading: what ``optimizer.load_state_dict`` takes, with this
rank's slices. A plain optimizer's state dict is full state by number; :func:`rekey_optim_state_dict` goes from one to the
other, so plain state can be loaded here, and full state into a plain optimizer::

    full = optim_state.full_optim_state_dict(model, optimizer)  # on rank 0
    plain = optim_state.rekey_optim_state_dict(full, OptimStateKeyType.PARAM_ID, model, optim=optimizer)

Unlike there, parameters may have any dtypes, all forms can be had with and without `rank0_only`, and `model` is the sharded
module itself. Entries are by the parameters' names. Parameters without state have no entry; state that is neither a tensor
of the parameter's shape nor a number (a list, say) goes along as it is.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
from torch import nn

from .comm.consensus import agree
from .comm.process_groups import ranks_of
from .engine import Engine, engine_of
from .errors import ConfigError, StateDictError
from .optim.engines_of_optimizer import params_of
from .optim.matrix import state as matrix_state
from .state import optimizer_state

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
    """What stands for a parameter in a state dict. Torch's own enumeration is taken as well."""

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
    """Whole optimizer state by parameter name, on the CPU. Collective.

    Args:
        model: a sharded model.
        optim: an optimizer over its parameters.
        optim_input: what `optim` was made from; checked only.
        rank0_only: the other ranks get an empty dict.
        group: the process group of the model's ranks; checked only.

    Returns:
        ``{"state": {name: {...}}, "param_groups": [{..., "params": [names]}]}``.

    Raises:
        ConfigError: `model` is not sharded, or `optim_input` or `group` are not those of this optimizer and model.
        StateDictError: `optim` holds a parameter that is not in `model`.
    """
    engine = _engine(model, "full_optim_state_dict", group)
    _check_input(engine, optim, optim_input, "full_optim_state_dict")
    return engine.optim_state_dict(optim, rank0_only=rank0_only)


def sharded_optim_state_dict(model: nn.Module, optim: torch.optim.Optimizer, group: Any = None) -> dict[str, Any]:
    """Optimizer state by parameter name, what has the parameter's shape in ShardTensors. Collective.

    That is the state itself, not a copy. From optimizers that step on whole matrices it is sent by the ranks that own them,
    one parameter at a time, and each rank keeps its slices; state of other shapes is whole on every rank.

    Args and errors as in :func:`full_optim_state_dict`.
    """
    what = "sharded_optim_state_dict"
    return _sharded(_engine(model, what, group), optim, None, what)


def _sharded(engine: Engine, optim: torch.optim.Optimizer, given: dict[str, Any] | None, what: str) -> dict[str, Any]:
    names: list[str] = []
    taken: dict[str, Any] = {"state": {}, "param_groups": []}
    error: Exception | None = None
    try:
        names, taken = _by_number(engine, optim), optim.state_dict() if given is None else given
    except Exception as problem:  # the other ranks must hear of it
        error = problem
    agree(engine._runtime, what, names, error)
    keep = _slices_of(optim)
    state = matrix_state.collect(engine._runtime, taken["state"], len(names), True, what, keep)
    if engine.world_size == 1 and matrix_state.is_matrix(engine._runtime, optim):
        state = {number: keep(number, own) if number in range(len(names)) else own for number, own in state.items()}
    return _renamed({**taken, "state": state}, dict(enumerate(names)), what, engine.rank)


def optim_state_dict(
    model: nn.Module,
    optim: torch.optim.Optimizer,
    optim_state_dict: dict[str, Any] | None = None,
    group: Any = None,
) -> dict[str, Any]:
    """Optimizer state by parameter name, in the form that is set by :mod:`torch_shard.state_dict_type`; whole, on every rank
    and on the CPU, where none is set. Collective.

    Args:
        model: a sharded model.
        optim: an optimizer over its parameters.
        optim_state_dict: what to convert, in place of ``optim.state_dict()``: by number, with plain tensors or ShardTensors.
        group: as in :func:`full_optim_state_dict`.

    Returns, and errors, as in :func:`full_optim_state_dict`.

    Raises:
        ConfigError: besides, local slices are set, which have no form for optimizers.
    """
    what = "optim_state_dict"
    engine = _engine(model, what, group)
    settings = engine._runtime.state_dict_settings
    form = "FULL_STATE_DICT" if settings is None else settings.state_dict_type.name
    if form == "LOCAL_STATE_DICT":
        raise ConfigError(f"rank {engine.rank}: {what}: LOCAL_STATE_DICT is for models; set another type.")
    if form == "SHARDED_STATE_DICT":
        return _sharded(engine, optim, optim_state_dict, what)
    config = None if settings is None else settings.optim_state_dict_config
    rank0_only = bool(getattr(config, "rank0_only", False))
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
    """State from any of the forms here, for ``optim.load_state_dict``. Collective.

    Args:
        model: a sharded model.
        optim: an optimizer over its parameters, with their groups.
        optim_state_dict: on every rank, by name or by number, with whole tensors or ShardTensors cut like the parameters. With
            ``rank0_only`` set (:mod:`torch_shard.state_dict_type`) that of rank 0, and the others' is not looked at.
        is_named_optimizer: accepted for the sake of code that passes it; the dict itself tells.
        load_directly: also load it.
        group: as in :func:`full_optim_state_dict`.

    Returns:
        A dict by number with this rank's slices, in new memory.

    Raises:
        StateDictError: on all ranks, with everything that does not fit; nothing has been changed.
        ConfigError: as :func:`full_optim_state_dict`.
    """
    what = "optim_state_dict_to_load"
    engine = _engine(model, what, group)
    settings = engine._runtime.state_dict_settings
    if settings is not None and getattr(settings.optim_state_dict_config, "rank0_only", False):
        result = scatter_full_optim_state_dict(optim_state_dict, model, optim=optim, group=group)
        if load_directly:
            optim.load_state_dict(result)
            optimizer_state.keep_as_saved(optim, result["state"])
        return result
    return _to_load(engine, optim, optim_state_dict, what, load_directly)


def shard_full_optim_state_dict(
    full_optim_state_dict: dict[str, Any],
    model: nn.Module,
    optim_input: _Input = None,
    optim: torch.optim.Optimizer | None = None,
) -> dict[str, Any]:
    """This rank's slices of full state that every rank has, for ``optim.load_state_dict``. Collective.

    Args:
        full_optim_state_dict: whole tensors by name, or by number.
        model: a sharded model.
        optim_input: checked only.
        optim: an optimizer over the model's parameters; needed here.

    Returns, and errors, as in :func:`optim_state_dict_to_load`.
    """
    engine = _engine(model, "shard_full_optim_state_dict", None)
    optim = _needed(optim, engine, optim_input, "shard_full_optim_state_dict")
    return _to_load(engine, optim, full_optim_state_dict, "shard_full_optim_state_dict")


def flatten_sharded_optim_state_dict(
    sharded_optim_state_dict: dict[str, Any], model: nn.Module, optim: torch.optim.Optimizer
) -> dict[str, Any]:
    """State as :func:`sharded_optim_state_dict` gives it, for ``optim.load_state_dict``. Collective.

    Returns, and errors, as in :func:`optim_state_dict_to_load`.
    """
    engine = _engine(model, "flatten_sharded_optim_state_dict", None)
    return _to_load(engine, optim, sharded_optim_state_dict, "flatten_sharded_optim_state_dict")


def scatter_full_optim_state_dict(
    full_optim_state_dict: dict[str, Any] | None,
    model: nn.Module,
    optim_input: _Input = None,
    optim: torch.optim.Optimizer | None = None,
    group: Any = None,
) -> dict[str, Any]:
    """Slices of full state that rank 0 has, for ``optim.load_state_dict`` on every rank. Collective.

    Rank 0 sends one tensor at a time, so another rank holds its slices and one whole tensor.

    Args:
        full_optim_state_dict: whole tensors by name or by number on rank 0; elsewhere it is not looked at.
        model: a sharded model.
        optim_input: checked only.
        optim: an optimizer over the model's parameters; needed here.
        group: as in :func:`full_optim_state_dict`.

    Returns, and errors, as in :func:`optim_state_dict_to_load`.
    """
    what = "scatter_full_optim_state_dict"
    engine = _engine(model, what, group)
    optim = _needed(optim, engine, optim_input, what)
    runtime, given, error = engine._runtime, full_optim_state_dict, None
    names: list[str] = []
    numbered: dict[str, Any] = {"state": {}, "param_groups": []}
    try:
        names = _by_number(engine, optim)
        if engine.rank == 0:
            if not isinstance(given, Mapping) or not {"state", "param_groups"} <= set(given):
                raise StateDictError(f"rank 0: {what}: rank 0 needs a dict with 'state' and 'param_groups'.")
            numbers = {name: number for number, name in enumerate(names)}
            numbered = _renamed(_named(engine, optim, given, what), numbers, what, 0)
    except Exception as problem:  # the other ranks must hear of it
        error = problem
    agree(runtime, what, names, error)
    keep, count = _slices_of(optim), len(names)
    # State of no parameter, and of parameters that have none.
    own = {key: value for key, value in numbered["state"].items() if key not in range(count) or not value}
    groups, own = matrix_state.broadcast_object(runtime, (numbered["param_groups"], own), 0, what)
    state = {number: entries for number, entries in numbered["state"].items() if number not in own}
    if engine.world_size > 1:
        state = dict(matrix_state.collect(runtime, state, count, True, what, keep))
    received = {"state": {**state, **own}, "param_groups": groups}
    return _to_load(engine, optim, _renamed(received, dict(enumerate(names)), what, engine.rank), what)


def _slices_of(optim: torch.optim.Optimizer) -> Callable[[int, Any], Any]:
    params = params_of(optim)

    def keep(number: int, entries: Mapping[str, Any]) -> dict[str, Any]:
        return {key: optimizer_state.own_part(params[number], key, value) for key, value in entries.items()}

    return keep


# -- names and numbers --------------------------------------------------------------------------------------------------


def rekey_optim_state_dict(
    optim_state_dict: dict[str, Any],
    optim_state_key_type: Any,
    model: nn.Module,
    optim_input: _Input = None,
    optim: torch.optim.Optimizer | None = None,
) -> dict[str, Any]:
    """Put parameters' names in place of their numbers in a state dict, or the other way round. Not collective.

    Args:
        optim_state_dict: by name or by number. Its tensors are not copied.
        optim_state_key_type: what the result shall be by; :class:`OptimStateKeyType` or torch's.
        model: sharded or plain.
        optim_input: what the optimizer was made from: parameters or groups of them.
        optim: the optimizer; one of the two is needed. Numbers follow the order of its groups.

    Raises:
        ConfigError: no `optim` and no `optim_input`, or another key type.
        StateDictError: a parameter that is not in `model`, or an entry of none.
    """
    what = "rekey_optim_state_dict"
    kind = getattr(optim_state_key_type, "name", None)
    if kind not in OptimStateKeyType.__members__:
        raise ConfigError(f"{what}: optim_state_key_type must be an OptimStateKeyType, not {optim_state_key_type!r}.")
    if optim is None and optim_input is None:
        raise ConfigError(f"{what}: give the optimizer (optim=...), or what it was made from (optim_input=...).")
    params = params_of(optim) if optim is not None else _listed(optim_input)
    engine = engine_of(model)
    known = {id(p): name for name, p in model.named_parameters()}
    if engine is not None:
        known.update({id(p): n for unit in engine.units for n, p in zip(unit.names, unit.params, strict=True)})
    if any(id(p) not in known for p in params):
        raise StateDictError(f"{what}: the optimizer holds parameters that are not in the model.")
    names = [known[id(p)] for p in params]
    by_name = {name: number for number, name in enumerate(names)}
    given = {key for group in optim_state_dict["param_groups"] for key in group["params"]}
    if kind == "PARAM_NAME":
        mapping: dict[Any, Any] = dict(enumerate(names)) if not given <= set(by_name) else {n: n for n in names}
    else:
        mapping = dict(by_name) if given <= set(by_name) else {number: number for number in range(len(names))}
    return _renamed(optim_state_dict, mapping, what, 0 if engine is None else engine.rank)


def _renamed(state_dict: Mapping[str, Any], mapping: Mapping[Any, Any], what: str, rank: int) -> dict[str, Any]:
    unknown = [k for group in state_dict["param_groups"] for k in group["params"] if k not in mapping]
    if unknown:
        raise StateDictError(
            f"rank {rank}: {what}: the dict's groups have {', '.join(map(repr, unknown[:5]))}, of which the optimizer has no "
            "parameter. Make it with the groups that were saved."
        )
    listed = {k for group in state_dict["param_groups"] for k in group["params"]}
    other = [key for key in state_dict["state"] if key not in listed]
    result = {
        "state": {mapping[key] if key in listed else key: value for key, value in state_dict["state"].items()},
        "param_groups": [
            {**group, "params": [mapping[key] for key in group["params"]]} for group in state_dict["param_groups"]
        ],
    }
    return {**result, optimizer_state.OTHER: other} if other else result


def _by_number(engine: Engine, optim: torch.optim.Optimizer) -> list[str]:
    names = optimizer_state.names_of(engine._runtime, optim, engine.model)
    return [names[id(p)] for p in params_of(optim)]


def _named(engine: Engine, optim: torch.optim.Optimizer, given: Mapping[str, Any], what: str) -> dict[str, Any]:
    names = _by_number(engine, optim)
    if not isinstance(given, Mapping) or not {"state", "param_groups"} <= set(given):
        raise StateDictError(f"rank {engine.rank}: {what}: this rank needs a dict with 'state' and 'param_groups'.")
    keys = {key for group in given["param_groups"] for key in group["params"]}
    if keys <= set(names):
        return dict(given)
    return _renamed(given, dict(enumerate(names)), what, engine.rank)


# -- shared -----------------------------------------------------------------------------------------------------------


def _to_load(
    engine: Engine, optim: torch.optim.Optimizer, given: Mapping[str, Any], what: str, directly: bool = False
) -> dict[str, Any]:
    error: Exception | None = None
    named: dict[str, Any] = {}
    try:
        named = _named(engine, optim, given, what)
    except Exception as problem:  # the other ranks must hear of it
        error = problem
    agree(engine._runtime, what, None, error)
    result = optimizer_state.optim_state_dict_to_load(engine._runtime, optim, named, engine.model, what)
    if directly:
        optim.load_state_dict(result)
        optimizer_state.keep_as_saved(optim, result["state"])
    return result


def _engine(model: nn.Module, what: str, group: Any) -> Engine:
    engine = engine_of(model)
    if engine is None:
        raise ConfigError(
            f"{what}: the model is not sharded; use the optimizer's own state_dict() and load_state_dict()."
        )
    if group is not None:
        ranks = list(engine._runtime.collectives.watchdog.ranks)
        if ranks_of(group) != ranks:
            raise ConfigError(
                f"rank {engine.rank}: {what}: group has ranks {ranks_of(group)}, the model is sharded over "
                f"{ranks}. Leave it out."
            )
    return engine


def _listed(optim_input: _Input) -> list[Any]:
    found: list[Any] = []
    for item in cast(Iterable[Any], optim_input):
        params = item["params"] if isinstance(item, Mapping) else [item]
        found += [params] if isinstance(params, torch.Tensor) else list(params)
    return found


def _check_input(engine: Engine, optim: torch.optim.Optimizer, optim_input: _Input, what: str) -> None:
    if optim_input is None:
        return
    if list(map(id, _listed(optim_input))) != list(map(id, params_of(optim))):
        raise ConfigError(
            f"rank {engine.rank}: {what}: optim_input lists other parameters than the optimizer holds, or in another order. "
            "Leave it out (an iterator like model.parameters() can be gone through once only)."
        )


def _needed(
    optim: torch.optim.Optimizer | None, engine: Engine, optim_input: _Input, what: str
) -> torch.optim.Optimizer:
    if optim is None:
        raise ConfigError(f"rank {engine.rank}: {what}: pass the optimizer, optim=...; its groups say what is loaded.")
    _check_input(engine, optim, optim_input, what)
    return optim
