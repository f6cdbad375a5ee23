"""State dicts in plain torch form: whole tensors by name, gathered unit by unit, loaded all or nothing."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from . import owned_state
from .agreement import NoteLoad
from .errors import StateDictError, UnitStateError
from .flat_buffer import FlatBuffer
from .log import logger
from .runtime import Runtime
from .shard_tensor import ShardTensor, same_cut, slice_full
from .unit import Unit
from .whole import agree, gathered_values, whole_slices

# -- the model --------------------------------------------------------------------------------------------------------


def state_dict(
    model: nn.Module, runtime: Runtime, rank0_only: bool = True, offload_to_cpu: bool = True
) -> dict[str, Any]:
    """What ``model.state_dict()`` of the unsharded model gives, as a snapshot. Collective.

    Args:
        model: the sharded model.
        runtime: its runtime.
        rank0_only: the other ranks return an empty dict.
        offload_to_cpu: put all tensors on the CPU.

    Returns:
        The module's own state dict (its hooks, extra state and metadata included) with whole plain tensors in new
        memory. Names of one tied parameter share one tensor.
    """
    what = "engine.state_dict"
    error: Exception | None = None
    found: dict[str, Any] = {}
    try:
        found = own_state_dict(model, runtime)
    except Exception as problem:  # the other ranks must hear of it
        error = problem
    make_whole(runtime, found, rank0_only, offload_to_cpu, what, error)
    return found


def own_state_dict(model: nn.Module, runtime: Runtime) -> dict[str, Any]:
    """``model.state_dict()`` with ShardTensors, whatever form is set for it. Not collective."""
    kept, runtime.state_dict_settings = runtime.state_dict_settings, None
    try:
        found: dict[str, Any] = model.state_dict()
    finally:
        runtime.state_dict_settings = kept
    return found


def make_whole(
    runtime: Runtime,
    found: dict[str, Any],
    rank0_only: bool,
    offload_to_cpu: bool,
    what: str,
    error: Exception | None = None,
) -> None:
    """Put whole copies in place of ShardTensors and references, in a state dict. Collective.

    Args:
        runtime: of the sharded model.
        found: changed; on ranks that shall have nothing it is empty afterwards.
        rank0_only: the other ranks shall have nothing.
        offload_to_cpu: put all tensors on the CPU.
        what: for messages.
        error: why this rank cannot go on.
    """
    try:
        _refuse_inside(runtime, what)
    except Exception as problem:  # the other ranks must hear of it
        error = error or problem
    sharded = {k: v for k, v in found.items() if isinstance(v, ShardTensor)}
    agree(runtime, what, list(sharded), error)
    wanted = not rank0_only or runtime.collectives.world_rank == 0
    places: dict[int, tuple[Unit, FlatBuffer]] = {
        id(flat.layout): (unit, flat) for unit in runtime.units for flat in unit.flats
    }
    by_unit: dict[int, list[tuple[str, FlatBuffer]]] = {}
    rest: list[str] = []
    for key, value in sharded.items():
        place = places.get(id(value._spec.layout))
        if place is not None and _is_parameter(value, place[1]):
            by_unit.setdefault(place[0].index, []).append((key, place[1]))
        else:
            rest.append(key)  # a hook of the module has made something else of it
    copies: dict[tuple[int, int], torch.Tensor] = {}
    for unit in runtime.units:
        entries = by_unit.get(unit.index)
        if not entries:
            continue
        with gathered_values(runtime, unit):
            for key, flat in entries if wanted else ():
                index = sharded[key]._spec.index
                same = (id(flat), index)
                if same not in copies:
                    copies[same] = _copied(flat.view(flat.full, index), offload_to_cpu)
                found[key] = copies[same]
    for key in rest:
        whole = sharded[key].full_tensor()
        found[key] = whole.cpu() if offload_to_cpu else whole
    if not wanted:
        found.clear()
    for key, value in found.items():
        if isinstance(value, torch.Tensor) and key not in sharded:
            found[key] = _copied(value, offload_to_cpu)


def _refuse_inside(runtime: Runtime, what: str) -> None:
    runtime.on_demand.check_copies()
    for unit in runtime.units:
        if unit.is_summoned or unit.summons or unit.running:
            raise UnitStateError(
                f"rank {runtime.collectives.world_rank}: {what} inside a forward or engine.gathered() of unit "
                f"{unit.name!r}; call it outside."
            )


def _is_parameter(value: ShardTensor, flat: FlatBuffer) -> bool:
    own = flat.params[value._spec.index]._local
    return (
        value._local.data_ptr() == own.data_ptr()
        and value._local.dtype == own.dtype
        and own.numel() > 0
        or (value._spec.length == 0 and value._local.dtype == own.dtype and value._unit_ref is not None)
    )


def _copied(tensor: torch.Tensor, to_cpu: bool) -> torch.Tensor:
    with torch.no_grad():
        tensor = tensor.detach()
        return tensor.to("cpu", copy=True) if to_cpu else tensor.clone()


def load_state_dict(model: nn.Module, runtime: Runtime, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
    """Load whole plain tensors (or ShardTensors of this model) by name. Collective.

    Every module's own loading (renaming hooks, versions, extra state) is first run without effect, on all ranks.

    Returns:
        torch's named tuple ``(missing_keys, unexpected_keys)``.

    Raises:
        StateDictError: on all ranks, with all missing, unexpected and wrongly shaped entries; nothing has been loaded.
    """
    what = "engine.load_state_dict"
    error: Exception | None = None
    try:
        _refuse_inside(runtime, what)
        missing, unexpected, problems = _rehearse(model, state_dict)
        hint = " Pass strict=False to accept missing and unexpected entries."
        error = _describe(runtime, what, missing if strict else [], unexpected if strict else [], problems, hint)
    except Exception as problem:  # the other ranks must hear of it
        error = problem
    kinds = [(k, isinstance(v, ShardTensor)) for k, v in state_dict.items()] if error is None else None
    agree(runtime, what, kinds, error)
    given = dict(state_dict)
    for key, value in given.items():
        if isinstance(value, ShardTensor) and not _fits(runtime, value):
            given[key] = value.full_tensor()  # from another engine, or for another number of ranks
    metadata = getattr(state_dict, "_metadata", None)
    plain = WithMetadata(given)
    if metadata is not None:
        plain._metadata = metadata
    result = model.load_state_dict(plain, strict=strict)
    runtime.parameters_changed()
    return result


class WithMetadata(dict):  # type: ignore[type-arg]
    """A dict that takes torch's ``_metadata`` attribute."""

    _metadata: Any


_WithMetadata = WithMetadata


def _fits(runtime: Runtime, value: ShardTensor) -> bool:
    spec = value._spec
    return any(p._spec.name == spec.name and same_cut(spec, p._spec) for unit in runtime.units for p in unit.params)


def _describe(
    runtime: Runtime, what: str, missing: list[str], unexpected: list[str], problems: list[str], hint: str = ""
) -> StateDictError | None:
    lines = []
    if missing:
        lines.append(f"missing: {', '.join(missing)}")
    if unexpected:
        lines.append(f"unexpected: {', '.join(unexpected)}")
    lines += problems
    if not lines:
        return None
    hint = hint if missing or unexpected else ""
    return StateDictError(
        f"rank {runtime.collectives.world_rank}: {what}: the state dict does not fit, and nothing was loaded.{hint}\n  "
        + "\n  ".join(lines)
    )


def _rehearse(model: nn.Module, given: Mapping[str, Any]) -> tuple[list[str], list[str], list[str]]:
    """Run the modules' loading on meta tensors, where copying has no effect: missing, unexpected, errors."""
    if not isinstance(given, Mapping):
        raise StateDictError(f"a state dict is a mapping from names to tensors, not {type(given).__name__}.")
    trial = WithMetadata({k: _stand_in(v).data if isinstance(v, ShardTensor) else v for k, v in given.items()})
    metadata = getattr(given, "_metadata", None)
    if metadata is not None:
        trial._metadata = metadata
    missing: list[str] = []
    unexpected: list[str] = []
    problems: list[str] = []

    def visit(module: nn.Module, entries: dict[str, Any], prefix: str) -> None:
        local = {} if metadata is None else metadata.get(prefix[:-1], {})
        module._load_from_state_dict(entries, prefix, local, True, missing, unexpected, problems)
        for name, child in module._modules.items():
            if child is not None:
                below = f"{prefix}{name}."
                visit(child, {k: v for k, v in entries.items() if k.startswith(below)}, below)
        if missing or unexpected:
            # Such hooks may forgive a missing key; they need not run where there is none.
            keys = nn.modules.module._IncompatibleKeys(missing, unexpected)
            for hook in module._load_state_dict_post_hooks.values():
                if not isinstance(hook, NoteLoad):  # nothing is loaded
                    hook(module, keys)

    kept: list[tuple[nn.Module, dict[str, Any], dict[str, Any], dict[str, Any]]] = []
    try:
        for module in model.modules():
            kept.append((module, dict(module._parameters), dict(module._buffers), dict(module.__dict__)))
            for slots in (module._parameters, module._buffers):
                for name, value in slots.items():
                    if value is not None:
                        slots[name] = _stand_in(value)  # type: ignore[assignment]
            if type(module).set_extra_state is not nn.Module.set_extra_state:
                module.__dict__["set_extra_state"] = lambda state: None
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")  # "copying to a meta parameter is a no-op": on purpose
            visit(model, trial, "")
    finally:
        for module, parameters, buffers, attributes in kept:
            for slots, before in ((module._parameters, parameters), (module._buffers, buffers)):
                slots.clear()
                slots.update(before)
            module.__dict__.pop("set_extra_state", None)
            if "set_extra_state" in attributes:
                module.__dict__["set_extra_state"] = attributes["set_extra_state"]
    return list(dict.fromkeys(missing)), list(dict.fromkeys(unexpected)), problems


def _stand_in(value: torch.Tensor) -> torch.Tensor:
    meta = torch.empty(value.shape, dtype=value.dtype, device="meta")
    if isinstance(value, (nn.Parameter, ShardTensor)):
        return nn.Parameter(meta, requires_grad=False)
    return meta


# -- the optimizer ----------------------------------------------------------------------------------------------------


def names_of(runtime: Runtime, optimizer: torch.optim.Optimizer, model: nn.Module | None) -> dict[int, str]:
    """The name of each of the optimizer's parameters, by id."""
    names = {id(p): n for unit in runtime.units for n, p in zip(unit.names, unit.params, strict=True)}
    if model is not None:
        for name, p in model.named_parameters():
            names.setdefault(id(p), name)
    for number, group in enumerate(optimizer.param_groups):
        given = group.get("param_names")
        for i, p in enumerate(group["params"]):
            if id(p) not in names and given is not None:
                names[id(p)] = given[i]
            if id(p) not in names:
                raise StateDictError(
                    f"rank {runtime.collectives.world_rank}: parameter {i} of the optimizer's group {number}, of shape "
                    f"{tuple(p.shape)}, is not a parameter of this model; save that optimizer by itself."
                )
    return names


def _slot(runtime: Runtime, param: torch.Tensor) -> tuple[FlatBuffer, int] | None:
    if isinstance(param, ShardTensor):
        for unit in runtime.units:
            for flat in unit.flats:
                if flat.layout is param._spec.layout:
                    return flat, param._spec.index
    return None


def optim_state_dict(
    runtime: Runtime,
    optimizer: torch.optim.Optimizer,
    rank0_only: bool = True,
    model: nn.Module | None = None,
    given: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Whole optimizer state by parameter name, on the CPU. Collective.

    Args:
        runtime: of the engine.
        optimizer: any that holds parameters of the model.
        rank0_only: the other ranks return an empty dict.
        model: finds the names of ignored parameters.
        given: state by number, in place of the optimizer's own.

    Returns:
        ``{"state": {name: {...}}, "param_groups": [{..., "params": [names]}]}``: torch's own optimizer state dict
        with names in place of numbers. Where the optimizer has state of no parameter, ``"other_state"`` lists its keys.
    """
    what = "engine.optim_state_dict"
    error: Exception | None = None
    names: dict[int, str] = {}
    taken: dict[str, Any] = {"state": {}, "param_groups": []}
    try:
        names = names_of(runtime, optimizer, model)
        taken = optimizer.state_dict() if given is None else given
    except Exception as problem:  # the other ranks must hear of it
        error = problem
    numbers = [p for group in optimizer.param_groups for p in group["params"]]  # torch counts like this
    state: dict[Any, Any] = {}
    jobs: dict[tuple[int, str, str], dict[int, torch.Tensor]] = {}
    flats = {id(flat): flat for unit in runtime.units for flat in unit.flats}
    rest: list[tuple[str, str, ShardTensor]] = []
    for number, entries in taken["state"].items():
        if not _is_number(number, numbers):
            state[number] = entries  # the optimizer's own, of no parameter
            continue
        param = numbers[number]
        name = names[id(param)]
        state[name] = dict(entries)
        for key, value in entries.items():
            if isinstance(value, ShardTensor):
                slot = _slot(runtime, param)
                if slot is not None and same_cut(value._spec, param._spec):
                    jobs.setdefault((id(slot[0]), str(key), str(value.dtype)), {})[slot[1]] = value._local
                else:
                    rest.append((name, key, value))
    order = {id(flat): n for n, flat in enumerate(flats.values())}
    chosen = sorted(jobs, key=lambda j: (order[j[0]], j[1], j[2]))
    key = [(order[j[0]], j[1], j[2], sorted(jobs[j])) for j in chosen] + [(n, k) for n, k, _ in rest]
    agree(runtime, what, (len(numbers), key), error)
    wanted = not rank0_only or runtime.collectives.world_rank == 0
    known = owned_state.collect(runtime, taken["state"], len(numbers), wanted, what)
    if known is not taken["state"]:  # in the order of the parameters, and with what other ranks own
        state = {
            names[id(numbers[n])] if _is_number(n, numbers) else n: dict(own) if isinstance(own, dict) else own
            for n, own in known.items()
        }
    for job in chosen:
        flat = flats[job[0]]
        slices = [jobs[job].get(i) for i in range(len(flat.params))]
        whole = whole_slices(flat, slices, what)
        if wanted:
            for i, value in enumerate(whole):
                if value is not None:
                    state[flat.layout.slots[i].name][job[1]] = _copied(value, to_cpu=True)
    for name, entry, value in rest:
        state[name][entry] = value.full_tensor().cpu()
    if not wanted:
        return {}
    # A snapshot: the next step changes what is whole here.
    state = {name: owned_state.copied(entries, "cpu") for name, entries in state.items()}
    groups = []
    for group, live in zip(taken["param_groups"], optimizer.param_groups, strict=True):
        groups.append({**group, "params": [names[id(p)] for p in live["params"]]})
    own = [key for key in state if key not in names.values()]
    return {"state": state, "param_groups": groups, **({OTHER: own} if own else {})}


OTHER = "other_state"  # entry of our dicts: keys in "state" that are no parameter's


def _is_number(key: Any, numbers: list[Any]) -> bool:
    """Whether a key of torch's state dict stands for a parameter."""
    return type(key) is int and 0 <= key < len(numbers)


def load_optim_state_dict(
    runtime: Runtime, optimizer: torch.optim.Optimizer, state_dict: Mapping[str, Any], model: nn.Module | None = None
) -> None:
    """Load what :func:`optim_state_dict` gave, on any number of ranks. Collective: every rank needs the dict.

    Parameters are matched by name, groups by position; hyperparameters come from the dict. The optimizer's own
    ``load_state_dict`` does the loading, with its hooks.

    Raises:
        StateDictError: on all ranks, with everything that does not fit; nothing has been loaded.
    """
    what = "engine.load_optim_state_dict"
    optimizer.load_state_dict(optim_state_dict_to_load(runtime, optimizer, state_dict, model, what))


def optim_state_dict_to_load(
    runtime: Runtime,
    optimizer: torch.optim.Optimizer,
    state_dict: Mapping[str, Any],
    model: nn.Module | None,
    what: str,
) -> dict[str, Any]:
    """From state by name, for the optimizer's ``load_state_dict``: by number, with this rank's slices. Collective.

    Raises:
        StateDictError: on all ranks, with everything that does not fit.
    """
    error: Exception | None = None
    names: dict[int, str] = {}
    trained = {id(p) for group in optimizer.param_groups for p in group["params"] if p.requires_grad}
    try:
        names = names_of(runtime, optimizer, model)
        error = _describe(runtime, what, *_compare(runtime, optimizer, names, state_dict))
    except Exception as problem:  # the other ranks must hear of it
        error = problem
    # With the empty ones: they decide who owns what.
    key = sorted((str(name), bool(entries)) for name, entries in state_dict["state"].items()) if error is None else None
    agree(runtime, what, key, error)
    elsewhere = owned_state.elsewhere(runtime, optimizer, names, state_dict["state"])
    # torch leaves a parameter that was never used out of the state, so this may be meant, and may be a loss.
    bare = [n for i, n in names.items() if i in trained and n not in state_dict["state"]] if state_dict["state"] else []
    if bare:
        logger.warning("%s: no state for %s while others have some: they start anew", what, ", ".join(bare))
    return by_number(optimizer, names, state_dict, elsewhere)


def by_number(
    optimizer: torch.optim.Optimizer,
    names: Mapping[int, str],
    state_dict: Mapping[str, Any],
    elsewhere: Mapping[int, bool] | None = None,
) -> dict[str, Any]:
    """A checked dict in torch's form: numbers for names, in the optimizer's own order, with this rank's slices. `names` by
    id of the parameters, `elsewhere` of those whose state is whole at one rank. Not collective."""
    elsewhere = elsewhere or {}
    state: dict[Any, Any] = {key: owned_state.copied(state_dict["state"][key]) for key in state_dict.get(OTHER, ())}
    groups: list[dict[str, Any]] = []
    number = 0
    for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
        count = len(group["params"])
        groups.append({**saved, "params": list(range(number, number + count))})
        for p in group["params"]:
            entries = state_dict["state"].get(names[id(p)])
            if entries and id(p) in elsewhere:
                if not elsewhere[id(p)]:
                    state[number] = owned_state.copied(entries)  # torch may keep what it is given
            elif entries:
                state[number] = {key: own_part(p, key, value) for key, value in entries.items()}
            number += 1
        if "param_names" in saved:
            groups[-1]["param_names"] = [names[id(p)] for p in group["params"]]
    return {"state": state, "param_groups": groups}


def own_part(param: torch.Tensor, key: str, value: Any) -> Any:
    """One entry of the state of `param`: this rank's slice where it has the parameter's shape."""
    if not isinstance(value, torch.Tensor):
        return value
    if isinstance(value, ShardTensor) or not isinstance(param, ShardTensor) or _is_scalar(param, key, value):
        return value.clone()  # torch may keep what it is given
    local = slice_full(value.detach(), param._spec).to(param._local.device, copy=True)
    return ShardTensor(local, param._spec)


def _is_scalar(param: torch.Tensor, key: str, value: torch.Tensor) -> bool:
    return key == "step" or value.shape != param.shape


def _compare(
    runtime: Runtime, optimizer: torch.optim.Optimizer, names: dict[int, str], given: Mapping[str, Any]
) -> tuple[list[str], list[str], list[str]]:
    if not isinstance(given, Mapping) or not {"state", "param_groups"} <= set(given):
        return [], [], ['the dict has no "state" and "param_groups" (ranks other than 0 need the dict too)']
    problems: list[str] = []
    missing: list[str] = []
    unexpected: list[str] = []
    saved_groups = given["param_groups"]
    if len(saved_groups) != len(optimizer.param_groups):
        problems.append(f"{len(saved_groups)} parameter groups where the optimizer has {len(optimizer.param_groups)}")
    else:
        for number, (group, saved) in enumerate(zip(optimizer.param_groups, saved_groups, strict=True)):
            live = [names[id(p)] for p in group["params"]]
            missing += [f"{n} (in group {number})" for n in live if n not in set(saved["params"])]
            unexpected += [f"{n} (in group {number})" for n in saved["params"] if n not in set(live)]
    by_name = {names[id(p)]: p for group in optimizer.param_groups for p in group["params"]}
    listed = {n for saved in saved_groups for n in saved["params"]}
    without = [n for n in by_name if n in listed and n not in given["state"]] if given["state"] else []
    lost = [n for n in without if optimizer.state.get(by_name[n])]
    missing += [f"{n} (state)" for n in lost]
    if lost:
        problems.append(
            f"the optimizer has state for {lost[0]}, which would be dropped; where that is meant, give an empty entry: "
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
                if not isinstance(param, ShardTensor) or not same_cut(value._spec, param._spec):
                    problems.append(f"{name}: {key} is a sharded tensor of another cut")
            elif isinstance(value, torch.Tensor) and not _shape_fits(runtime, optimizer, param, key, value):
                problems.append(f"{name}: {key} has shape {tuple(value.shape)}, the parameter {tuple(param.shape)}")
    return missing, unexpected, problems


def _shape_fits(
    runtime: Runtime, optimizer: torch.optim.Optimizer, param: torch.Tensor, key: str, value: torch.Tensor
) -> bool:
    if value.shape == param.shape or value.numel() <= 1:
        return True
    existing = optimizer.state.get(param, {}).get(key)
    if isinstance(existing, torch.Tensor):
        return existing.shape == value.shape
    # Factored state (Adafactor) has fewer dimensions than its parameter; that of other matrix optimizers has any shape.
    return value.dim() < param.dim() or owned_state.is_matrix(runtime, optimizer)
