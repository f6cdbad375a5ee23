"""Full optimizer state by the parameters' names: gathered unit by unit, and loaded all or nothing."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import nn

from ..comm.collective_steps import each
from ..comm.consensus import met
from ..errors import StateDictError
from ..layout.dtensor_placement import is_dtensor, local_of
from ..log import logger
from ..optim import state_tree
from ..optim.engines_of_optimizer import open_runtime_of, params_of, runtimes_of
from ..optim.matrix import state as matrix_state
from ..optim.registry import counters_in, is_counter
from ..runtime.runtime import Runtime
from ..shard_tensor.spec import same_cut, shard_of_full
from ..shard_tensor.tensor import ShardTensor
from ..unit.flat_buffer import FlatBuffer
from ..unit.full_values import full_tensors_from
from ..utils.pytree import map_tensors
from .model_state import Mismatches, misplaced
from .param_names import names_by_group, names_of


def optim_state_dict(
    runtime: Runtime,
    optimizer: torch.optim.Optimizer,
    rank0_only: bool = True,
    model: nn.Module | None = None,
    given: dict[str, Any] | None = None,
    own: bool = False,
) -> dict[str, Any]:
    """Return full optimizer state by parameter name, on the CPU. Collective.

    A rank that calls this alone, while the others do something else, reads the state of element-wise optimizers from them.

    Args:
        runtime: the engine's runtime.
        optimizer: an optimizer that holds parameters of the model.
        rank0_only: ranks other than 0 return an empty dict.
        model: the model, which has the names of ignored parameters.
        given: state by number, which takes the place of the optimizer's own.
        own: leave out the state of parameters that are not the model's.

    Returns:
        ``{"state": {name: {...}}, "param_groups": [{..., "params": [names]}]}``: torch's own optimizer state dict
        with names in place of numbers. If the optimizer has state that belongs to no parameter, ``"other_state"`` lists its
        keys.
    """
    what = "engine.optim_state_dict"
    error: Exception | None = None
    names: dict[int, str] = {}
    taken: dict[str, Any] = {"state": {}, "param_groups": []}
    try:
        names = names_of(runtime, optimizer, model, others=own)
        taken = complete(optimizer.state_dict() if given is None else given, what, runtime.collectives.world_rank)
    except Exception as problem:  # the other ranks must hear of it
        error = problem
    numbers = params_of(optimizer)
    if own:
        mine = {id(p) for p in (model.parameters() if model is not None else ())}
        mine.update(id(p) for unit in runtime.units for p in unit.params)
        others = {n for n, p in enumerate(numbers) if id(p) not in mine}
        taken = {**taken, "state": {key: entries for key, entries in taken["state"].items() if key not in others}}
    cut = sharded_entries(runtime, numbers, taken["state"])
    with runtime.lone.until_end():
        may_be_alone = given is None and is_readable_alone(runtime, optimizer)
        together = met(runtime, what, (len(numbers), cut.key), error, sure=True, alone=may_be_alone)
        wanted = not rank0_only or runtime.collectives.world_rank == 0
        elsewhere = matrix_state.descriptions(runtime, taken["state"], len(numbers), what) if together else {}
        # A snapshot: the next step changes what is not sharded.
        found = {n: state_tree.copied(entries, "cpu") for n, entries in taken["state"].items()} if wanted else {}
        values = (
            full_values(runtime, cut, elsewhere, taken["state"], wanted, what)
            if together
            else _values_read_alone(numbers, taken["state"] if wanted else {})
        )
        for gathered in values:
            for number, kind, value in gathered if wanted else ():
                if kind is None:
                    found[number] = value
                else:
                    found[number][kind] = state_tree.copied(value, "cpu")
                del value  # or two buffers would be in memory while the next one is gathered
    if not wanted:
        return {}
    state = {names[id(numbers[n])] if is_number(n, numbers) else n: found[n] for n in in_order(found, numbers)}
    groups = groups_by_name(optimizer, names, taken["param_groups"])
    parameters = set(names.values())
    of_none = [key for key in state if key not in parameters]
    return {"state": state, "param_groups": groups, **({OTHER: of_none} if of_none else {})}


def groups_by_name(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], taken: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return an optimizer's groups, as its ``state_dict()`` has them, with names in place of numbers."""
    live = names_by_group(optimizer, names)
    return [{**group, "params": own} for group, own in zip(taken, live, strict=True)]


def cut_like(value: Any, param: Any) -> TypeGuard[ShardTensor]:
    """Return True if a value of the state is a ShardTensor that is sharded like its parameter. Not collective."""
    return isinstance(value, ShardTensor) and isinstance(param, ShardTensor) and same_cut(value._spec, param._spec)


def is_readable_alone(runtime: Runtime, optimizer: Any) -> bool:
    """Return True if one rank alone can read all of an optimizer's state: every sharded entry is cut like its parameter.

    Not collective.
    """
    if matrix_state.is_matrix(runtime, optimizer) or not runtime.optimizer_states.are_read_alone:
        return False
    for param, entries in optimizer.state.items():
        for kind, value in entries.items() if isinstance(entries, Mapping) else ():
            if not any(isinstance(t, ShardTensor) or is_dtensor(t) for t in state_tree.tensors_of(value)):
                continue
            if not (isinstance(kind, str) and cut_like(value, param)):
                return False
            if param._spec.part is not None or open_runtime_of(param) is None:
                return False
    return True


def _values_read_alone(params: list[Any], state: Mapping[Any, Any]) -> Iterator[list[tuple[int, Any, Any]]]:
    """Yield number, kind and full value of the sharded state, of which :func:`is_readable_alone` is true. Not collective.

    Raises:
        DivergenceError: another rank has other state, or has stepped already.
        StateDictError: the state dict has other tensors than the optimizer.
    """
    for number, entries in state.items():
        for kind, value in entries.items() if isinstance(entries, Mapping) else ():
            if isinstance(value, ShardTensor):
                states = open_runtime_of(params[number]).optimizer_states  # type: ignore[union-attr]
                full = states.read(states.part_of(params[number], kind), value)
                if full is None:
                    raise StateDictError(
                        f"{kind!r} of {params[number]._spec.name} is not what the optimizer holds, since a hook of state_dict() "
                        "has replaced it; one rank alone can't read it. Save on every rank."
                    )
                yield [(number, kind, full)]


def complete(given: Any, what: str, rank: int) -> Any:
    """Return a state dict of an optimizer, which must have state and groups."""
    if not is_complete(given):
        raise StateDictError(f"rank {rank}: {what}: this rank needs a dict with 'state' and 'param_groups'.")
    return given


def is_complete(given: Any) -> bool:
    """Return True for a state dict of an optimizer, which has state and groups."""
    return isinstance(given, Mapping) and {"state", "param_groups"} <= set(given)


OTHER = "other_state"
"""The entry of our dicts that lists the keys in "state" that are no parameter's."""


class StateBatch(NamedTuple):
    """The entries of one key for all parameters of a flat buffer, gathered in one collective.

    Attributes:
        flat: the flat buffer.
        kind: the state's key, such as ``"exp_avg"``.
        shards: this rank's shards, in the order of the buffer's parameters; None for a parameter without such state.
        numbers: the numbers of these parameters in the optimizer; -1 for a parameter without such state.
    """

    flat: FlatBuffer
    kind: Any
    shards: list[torch.Tensor | None]
    numbers: list[int]


class ShardedEntries(NamedTuple):
    """An optimizer's sharded state, in the order in which all ranks gather it.

    Attributes:
        batches: the state that is sharded like its parameters.
        others: number, kind and value of all other state that holds ShardTensors or DTensors: what is sharded in another way, or
            split by tensor parallelism, too; DTensors from steps before sharding; lists and dicts of such tensors.
        key: an object that is equal on ranks that gather the same.
    """

    batches: list[StateBatch]
    others: list[tuple[int, Any, Any]]
    key: object


def sharded_entries(runtime: Runtime, params: list[Any], state: Mapping[Any, Any]) -> ShardedEntries:
    """Return the sharded entries of an optimizer's state. Not collective.

    Args:
        runtime: the engine's runtime.
        params: the optimizer's parameters, as torch counts them.
        state: state by number, as ``optimizer.state_dict()["state"]`` is.
    """
    flats = runtime.flats
    places = {id(flat.layout): place for place, flat in enumerate(flats) if not flat.split}
    batches: dict[tuple[int, str, str], StateBatch] = {}
    others: list[tuple[int, Any, Any]] = []
    for number, entries in state.items():
        param = params[number] if is_number(number, params) else None
        spec = param._spec if isinstance(param, ShardTensor) else None
        place = None if spec is None else places.get(id(spec.layout))
        for kind, value in entries.items() if param is not None else ():
            if spec is not None and place is not None and cut_like(value, param):
                key = place, str(kind), str(value.dtype)
                if key not in batches:
                    count = len(flats[place].params)
                    batches[key] = StateBatch(flats[place], kind, [None] * count, [-1] * count)
                batches[key].shards[spec.index], batches[key].numbers[spec.index] = value._local, number
            elif any(isinstance(t, ShardTensor) or is_dtensor(t) for t in state_tree.tensors_of(value)):
                others.append((number, kind, value))
    chosen = sorted(batches)
    same: list[Any] = [(*key, [number >= 0 for number in batches[key].numbers]) for key in chosen]
    same += [(number, kind, str(v.placements) if is_dtensor(v) else "") for number, kind, v in others]
    return ShardedEntries([batches[key] for key in chosen], others, same)


def full_values(
    runtime: Runtime,
    cut: ShardedEntries,
    elsewhere: Mapping[int, tuple[int, Any]],
    state: Mapping[Any, Any],
    wanted: bool,
    what: str,
    memory: torch.Tensor | None = None,
) -> Iterator[list[tuple[int, Any, Any]]]:
    """Yield number, kind and full value of state that is sharded, or that only another rank has, piece by piece. Collective.

    Args:
        runtime: the engine's runtime.
        cut: the sharded state.
        elsewhere: the state that only one rank has, as :func:`~..optim.matrix.state.descriptions` finds it. All entries of such
            a parameter come together, and their kind is None.
        state: state by number.
        wanted: this rank needs the values of `elsewhere`.
        what: the operation, for messages.
        memory: memory to gather in, as for :func:`.model_state.full_values`.
    """
    for group in cut.batches:
        full = full_tensors_from(group.flat, group.shards, what, memory)
        pieces = [(n, group.kind, value) for n, value in zip(group.numbers, full, strict=True) if value is not None]
        del full
        yield pieces
        pieces.clear()  # the caller's variable still refers to the list, and the next buffer is gathered now
    for number, kind, value in cut.others:
        yield [(number, kind, state_tree.map_tensors(value, _full))]
    for number, (source, description) in elsewhere.items():
        entries = matrix_state.sent(runtime, state, number, source, description, wanted, what)
        yield [(number, None, entries)] if wanted else []


def _full(tensor: Any) -> Any:
    return tensor.full_tensor() if isinstance(tensor, ShardTensor) or is_dtensor(tensor) else tensor


def in_order(state: Iterable[Any], numbers: list[Any]) -> list[Any]:
    """Return the keys of state by number: first those of parameters, in ascending order, then those of no parameter."""
    keys = list(state)
    return sorted(key for key in keys if is_number(key, numbers)) + [k for k in keys if not is_number(k, numbers)]


def is_number(key: Any, numbers: list[Any]) -> bool:
    """Return True if a key of torch's state dict stands for a parameter."""
    return type(key) is int and 0 <= key < len(numbers)


def load_optim_state_dict(
    runtime: Runtime, optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any], model: nn.Module | None = None
) -> None:
    """Load the result of :func:`optim_state_dict`, from any number of ranks. Collective: every rank needs the dict.

    Parameters are matched by name, groups by position; hyperparameters come from the dict. The optimizer's own
    ``load_state_dict`` does the loading, with its hooks.

    Raises:
        StateDictError: raised on all ranks, with all mismatches. Nothing has been loaded.
    """
    what = "engine.load_optim_state_dict"
    load_by_number(optimizer, optim_state_dict_to_load(runtime, optimizer, state_dict, model, what))


def optim_state_dict_to_load(
    runtime: Runtime,
    optimizer: torch.optim.Optimizer,
    state_dict: Mapping[str, Any],
    model: nn.Module | None,
    what: str,
) -> dict[str, Any]:
    """Return state by name as the optimizer's ``load_state_dict`` takes it: by number, with this rank's shards. Collective.

    Raises:
        StateDictError: raised on all ranks, with all mismatches.
    """

    def compare() -> dict[int, str]:
        names = names_of(runtime, optimizer, model)
        found = mismatches(runtime, optimizer, names, state_dict)
        found.refuse(f"rank {runtime.collectives.world_rank}: {what}: the state dict")
        return names

    def key(_: object) -> object:  # empty entries count, since they decide which rank owns what
        return sorted((str(name), bool(entries)) for name, entries in state_dict["state"].items())

    names = each(runtime, what, compare, key=key)
    trained = {id(p) for p in params_of(optimizer) if p.requires_grad}
    elsewhere = matrix_state.owned_elsewhere(runtime, optimizer, names, state_dict["state"])
    # torch leaves parameters that were never used out of the state, so this may be intended or a loss.
    bare = [n for i, n in names.items() if i in trained and n not in state_dict["state"]] if state_dict["state"] else []
    if bare:
        logger.warning("%s: no state for %s while others have some: they start anew", what, ", ".join(bare))
    return by_number(optimizer, names, state_dict, elsewhere)


def by_number(
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    state_dict: Mapping[str, Any],
    elsewhere: Mapping[int, bool],
    in_place: bool = False,
) -> dict[str, Any]:
    """Return a state dict that fits in torch's form: by number, with this rank's shards. Not collective.

    Args:
        optimizer: the optimizer whose parameters, groups and state these are.
        names: the parameters' names, by id.
        state_dict: state by name.
        elsewhere: the ids of parameters whose full state is at one rank, with True if that is another rank.
        in_place: copy shards into the optimizer's own state if it has any; its old values are lost.
    """
    state: dict[Any, Any] = {key: state_tree.copied(state_dict["state"][key]) for key in state_dict.get(OTHER, ())}
    counters = counters_in((p, state_dict["state"].get(names[id(p)])) for p in params_of(optimizer))
    for number, p in enumerate(params_of(optimizer)):
        entries = state_dict["state"].get(names[id(p)])
        if entries and id(p) in elsewhere:
            if not elsewhere[id(p)]:
                state[number] = state_tree.copied(state_tree.local(entries))  # torch may keep what it is given
        elif entries:
            own = optimizer.state.get(p, {}) if in_place else {}
            state[number] = {key: own_shard(p, key, value, counters, own.get(key)) for key, value in entries.items()}
    return {"state": state, "param_groups": groups_by_number(optimizer, names, state_dict["param_groups"])}


def load_by_name(
    runtime: Runtime,
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    state_dict: Mapping[str, Any],
    change: Callable[[dict[Any, Any]], None] = lambda state: None,
) -> None:
    """Load full state by name, which fits; this rank keeps its shards of it. Not collective; call it on all ranks.

    Args:
        runtime, optimizer, names, state_dict: the arguments of :func:`by_number`, and the engine's runtime.
        change: a function that is called with the state by number, to change it before it is loaded.

    Raises:
        StateDictError: the optimizer's own ``load_state_dict``, or one of the user's hooks of it, failed.
    """
    # This gives parameters owners, the same on all ranks.
    elsewhere = matrix_state.owned_elsewhere(runtime, optimizer, names, state_dict["state"])
    try:
        given = by_number(optimizer, names, state_dict, elsewhere, in_place=True)
        change(given["state"])
        load_by_number(optimizer, given)
    except Exception as error:
        raise failed_optimizer(type(optimizer).__name__, error) from error


def failed_optimizer(what: str, error: Exception) -> StateDictError:
    """Return the error for an optimizer, or a user's hook of one, that has raised `error` when it was loaded after the model."""
    return StateDictError(
        f"{what} could not be loaded, but the parameters have been; load again before training goes on: {type(error).__name__}: "
        f"{error}"
    )


def groups_by_number(
    optimizer: torch.optim.Optimizer, names: Mapping[int, str], saved: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return saved groups, which fit the optimizer's, with its parameters' numbers and, if they had names, with their names."""
    numbers = itertools.count()
    groups = []
    for group, given in zip(optimizer.param_groups, saved, strict=True):
        groups.append({**given, "params": [next(numbers) for _ in group["params"]]})
        if "param_names" in given:
            groups[-1]["param_names"] = [names[id(p)] for p in group["params"]]
    return groups


def own_shard(param: torch.Tensor, key: str, value: Any, counters: frozenset[Any], into: Any = None) -> Any:
    """Return this rank's shard of an entry of `param`'s state, copied to `into` if that fits; or an entry that is not sharded.

    `counters` is what :func:`~..optim.registry.counters_in` finds in the full state, here and below.
    """
    if not isinstance(value, torch.Tensor):
        return state_tree.local(value) if isinstance(param, ShardTensor) else value
    if isinstance(value, ShardTensor) or not is_cut(param, key, value.shape, counters):
        value = local_of(value) if isinstance(param, ShardTensor) else value
        return value.clone()  # torch may keep what it is given
    assert isinstance(param, ShardTensor)
    part = shard_of_full(value.detach(), param._spec)
    if cut_like(into, param) and into.dtype == value.dtype:
        with torch.no_grad():
            into._local.copy_(part)
        return into
    local = part.to(param._local.device, copy=True)
    return ShardTensor(local, param._spec)


def is_cut(param: torch.Tensor, key: Any, shape: torch.Size, counters: frozenset[Any]) -> bool:
    """Return True if full state of this shape is sharded like its parameter; False for a number, which every rank has."""
    return isinstance(param, ShardTensor) and is_elementwise(param, key, shape, counters)


def is_elementwise(param: torch.Tensor, key: Any, shape: torch.Size, counters: frozenset[Any]) -> bool:
    """Return True if full state of this shape has one element for each element of its parameter."""
    return shape == param.shape and not is_counter(key, shape, counters)


def load_by_number(optimizer: torch.optim.Optimizer, given: dict[str, Any]) -> None:
    """Load state by number, with this rank's shards, and keep it as it is given. Not collective; call it on all ranks.

    torch moves state to the parameter's device, casts it to the parameter's dtype, and makes generators of strings in tuples.
    All but the move is undone. A rank that reads alone finds the state from now on.
    """
    optimizer.load_state_dict(given)
    for held in runtimes_of(optimizer):
        held.served.add(optimizer)
    for number, p in enumerate(params_of(optimizer)):
        for key, value in given["state"].get(number, {}).items():
            live = optimizer.state.get(p, {}).get(key)
            if not isinstance(value, torch.Tensor) or isinstance(live, torch.Tensor) and live.dtype != value.dtype:
                optimizer.state[p][key] = map_tensors(value, partial(_moved, p.device))


def _moved(device: torch.device, tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.device == device else tensor.to(device)


def mismatches(
    runtime: Runtime, optimizer: torch.optim.Optimizer, names: dict[int, str], given: Mapping[str, Any]
) -> Mismatches:
    """Return the reasons why full state by name does not fit the optimizer. Not collective."""
    if not is_complete(given):
        return Mismatches([], [], ['the dict has no "state" and "param_groups" (ranks other than 0 need the dict too)'])
    problems: list[str] = []
    missing: list[str] = []
    unexpected: list[str] = []
    saved_groups = given["param_groups"]
    if len(saved_groups) != len(optimizer.param_groups):
        problems.append(f"{len(saved_groups)} parameter groups where the optimizer has {len(optimizer.param_groups)}")
    else:
        for number, (group, saved) in enumerate(zip(optimizer.param_groups, saved_groups, strict=True)):
            live, held = {names[id(p)]: None for p in group["params"]}, set(saved["params"])
            missing += [f"{n} (in group {number})" for n in live if n not in held]
            unexpected += [f"{n} (in group {number})" for n in saved["params"] if n not in live]
    by_name = {names[id(p)]: p for p in params_of(optimizer)}
    counters = counters_in((p, given["state"].get(name)) for name, p in by_name.items())
    listed = {n for saved in saved_groups for n in saved["params"]}
    without = [n for n in by_name if n in listed and n not in given["state"]] if given["state"] else []
    lost = [n for n in without if optimizer.state.get(by_name[n])]
    missing += [f"{n} (state)" for n in lost]
    if lost:
        problems.append(
            f"the optimizer has state for {lost[0]}, which would be dropped; if that is intended, give an empty entry: "
            f'state_dict["state"][{lost[0]!r}] = {{}}'
        )
    for name, entries in given["state"].items():
        param = by_name.get(name)
        if param is None:
            if name not in listed and name not in given.get(OTHER, ()):
                unexpected.append(f"{name} (state)")
            continue
        for key, value in entries.items():
            if isinstance(value, ShardTensor):
                if not cut_like(value, param):
                    problems.append(f"{name}: {key} is a ShardTensor that is not sharded like the parameter")
            elif isinstance(value, torch.Tensor) and not _shape_fits(runtime, optimizer, param, key, value):
                problems.append(f"{name}: {key} has shape {tuple(value.shape)}, the parameter {tuple(param.shape)}")
            elif isinstance(param, ShardTensor):
                # State that is not sharded like the parameter must be full.
                cut = isinstance(value, torch.Tensor) and is_cut(param, key, value.shape, counters)
                for tensor in state_tree.tensors_of(value):
                    problems += misplaced(tensor, param._spec.part if cut else None, f"{name}: {key}")
    return Mismatches(missing, unexpected, problems)


def _shape_fits(
    runtime: Runtime, optimizer: torch.optim.Optimizer, param: torch.Tensor, key: str, value: torch.Tensor
) -> bool:
    if value.shape == param.shape or value.numel() <= 1:
        return True
    existing = optimizer.state.get(param, {}).get(key)
    if isinstance(existing, torch.Tensor):
        return existing.shape == value.shape
    # Factored state (Adafactor) has fewer dimensions than its parameter; state of other matrix optimizers has any shape.
    return value.dim() < param.dim() or matrix_state.is_matrix(runtime, optimizer)
