"""A model's full state dict, in plain torch's form: full tensors by name, gathered unit by unit, and loaded all or nothing."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from ..comm.consensus import agree, met
from ..errors import ShardError, StateDictError, UnitStateError
from ..layout.dtensor_placement import is_dtensor, part_given
from ..layout.tensor_part import TensorPart
from ..runtime.load_hooks import notes_loads
from ..runtime.runtime import Runtime
from ..shard_tensor.spec import ShardSpec, same_cut
from ..shard_tensor.tensor import ShardTensor
from ..unit.flat_buffer import FlatBuffer
from ..unit.full_values import full_flat
from ..utils.patterns import without_wrappers
from ..utils.tensor_memory import memory_key
from .param_names import named_params


def state_dict(
    model: nn.Module, runtime: Runtime, rank0_only: bool = True, offload_to_cpu: bool = True
) -> dict[str, Any]:
    """Return a snapshot equal to the ``state_dict()`` of the unsharded model. Collective.

    Args:
        model: the sharded model.
        runtime: the model's runtime.
        rank0_only: ranks other than 0 return an empty dict.
        offload_to_cpu: all tensors are put on the CPU.

    Returns:
        The module's own state dict, with the effects of its hooks, extra state and metadata. Tensors are full and plain, in new
        memory, and the names of tied weights share one tensor.
    """
    what = "engine.state_dict"
    error: Exception | None = None
    found: dict[str, Any] = {}
    try:
        found = own_state_dict(model, runtime)
    except Exception as problem:  # the other ranks must hear of it
        error = problem
    make_full(runtime, found, rank0_only, offload_to_cpu, what, error)
    return found


def own_state_dict(model: nn.Module, runtime: Runtime) -> dict[str, Any]:
    """Return ``model.state_dict()`` with ShardTensors, whatever form is set for it. Not collective."""
    kept, runtime.state_dict_settings = runtime.state_dict_settings, None
    try:
        found: dict[str, Any] = model.state_dict()
    finally:
        runtime.state_dict_settings = kept
    return found


def sharded_state_dict(model: nn.Module, runtime: Runtime, offload_to_cpu: bool) -> dict[str, Any]:
    """Return ``model.state_dict()`` with ShardTensors that share memory with the parameters. Not collective.

    With `offload_to_cpu`, tensors on other devices are copied to the CPU.
    """
    found = own_state_dict(model, runtime)
    if offload_to_cpu:
        found.update({key: value.detach().cpu() for key, value in found.items() if isinstance(value, torch.Tensor)})
    return found


def make_full(
    runtime: Runtime,
    found: dict[str, Any],
    rank0_only: bool,
    offload_to_cpu: bool,
    what: str,
    error: Exception | None = None,
    prefix: str = "",
) -> None:
    """Replace the tensors of a state dict by full copies. Collective.

    Args:
        runtime: the sharded model's runtime.
        found: the state dict, which is changed. With `rank0_only`, only entries of other modules are left on other ranks.
        rank0_only: only rank 0 gets values. Another rank gets none, even if it reads alone, because it may only be early.
        offload_to_cpu: all tensors are put on the CPU.
        what: the operation, for messages.
        error: the reason why this rank cannot go on, if there is one.
        prefix: the prefix of the sharded module's names in the state dict.
    """
    try:
        refuse_inside(runtime, what)
    except Exception as problem:  # the other ranks must hear of it
        error = error or problem
    mine = {key: value for key, value in found.items() if key.startswith(prefix)}
    with runtime.lone.until_end():
        together = met(runtime, what, [key for key, value in mine.items() if isinstance(value, ShardTensor)], error)
        wanted = not rank0_only or runtime.collectives.world_rank == 0
        for gathered in full_values(entries_of(runtime, mine), what) if wanted or together else ():
            for entry, value in gathered if wanted else ():
                found.update(dict.fromkeys(entry.names, copied(value, offload_to_cpu)))
                del value  # or two buffers would be in memory while the next one is gathered
    for key in () if wanted else mine:
        del found[key]


class StateEntry(NamedTuple):
    """A tensor of a state dict.

    Attributes:
        names: the tensor's names; tied weights have several.
        value: the tensor.
        flat: the flat buffer with which the tensor is gathered; None if it is not a sharded parameter, or if tensor parallelism
            splits it, too.
    """

    names: list[str]
    value: Any
    flat: FlatBuffer | None


def entries_of(runtime: Runtime, found: Mapping[str, Any]) -> list[StateEntry]:
    """Return the tensors of a state dict in the order in which all ranks gather them. Not collective."""
    flats = {id(flat.layout): flat for flat in runtime.flats}
    entries: dict[Any, StateEntry] = {}
    for name, value in found.items():
        if not isinstance(value, torch.Tensor):
            continue
        flat, key = None, values_key(value)
        if isinstance(value, ShardTensor):
            own = flats.get(id(value._spec.layout))
            if own is not None and not own.split and is_parameter(value, own):
                flat, key = own, (id(own), value._spec.index)
        entries.setdefault(key, StateEntry([], value, flat)).names.append(name)
    order = {id(flat): number for number, flat in enumerate(flats.values())}
    last = len(order)
    return sorted(
        entries.values(),
        key=lambda e: last + (not isinstance(e.value, ShardTensor)) if e.flat is None else order[id(e.flat)],
    )


def values_key(tensor: torch.Tensor) -> Any:
    """Return a key that is equal for tensors, sharded or plain, that have the same values in the same memory."""
    if isinstance(tensor, ShardTensor) and tensor._unit_ref is not None:
        return id(tensor._spec), tensor._local.data_ptr(), tensor._local.dtype
    is_plain = type(tensor) in (torch.Tensor, nn.Parameter) and tensor.layout == torch.strided
    return memory_key(tensor) if is_plain and tensor.numel() else id(tensor)


def full_values(
    entries: Sequence[StateEntry], what: str, memory: torch.Tensor | None = None
) -> Iterator[list[tuple[StateEntry, torch.Tensor]]]:
    """Yield entries with their full values, those of one flat buffer together. Collective.

    Args:
        entries: the result of :func:`entries_of`.
        what: the operation, for messages.
        memory: uint8, on the engine's device; all values are gathered in it, and last until the next ones are asked for. None
            for new memory.
    """
    for flat, group in itertools.groupby(entries, lambda entry: entry.flat):
        if flat is not None:
            full = full_flat(flat, what, memory)
            pieces = [(entry, flat.view(full, entry.value._spec.index)) for entry in group]
            del full
            yield pieces
            pieces.clear()  # the caller's variable still refers to the list, and the next buffer is gathered now
    alone = [entry for entry in entries if entry.flat is None]
    for entry in alone:
        if isinstance(entry.value, ShardTensor):
            yield [(entry, entry.value.full_tensor())]
    # Ranks need not agree on plain tensors, so that these come together.
    yield [(entry, entry.value) for entry in alone if not isinstance(entry.value, ShardTensor)]


def refuse_inside(runtime: Runtime, what: str) -> None:
    """Raise a UnitStateError inside a forward or ``engine.gathered()``. Not collective."""
    runtime.forwards.leave_interrupted()
    runtime.on_demand.check_copies()
    for unit in runtime.units:
        if unit.is_summoned or unit.gathered_calls or unit.running:
            raise UnitStateError(
                f"rank {runtime.collectives.world_rank}: {what} inside a forward or engine.gathered() of unit "
                f"{unit.name!r}; call it outside."
            )


def is_parameter(value: ShardTensor, flat: FlatBuffer) -> bool:
    """Return True if a tensor that is sharded like a parameter of `flat` has this parameter's memory."""
    own = flat.params[value._spec.index]._local
    return (
        value._local.data_ptr() == own.data_ptr()
        and value._local.dtype == own.dtype
        and own.numel() > 0
        or (value._spec.length == 0 and value._local.dtype == own.dtype and value._unit_ref is not None)
    )


def copied(tensor: torch.Tensor, to_cpu: bool) -> torch.Tensor:
    """Return a copy of a tensor with its strides, on its device or the CPU. The copy of a ShardTensor is a ShardTensor."""
    with torch.no_grad():
        tensor = tensor.detach()
        return tensor.to("cpu", copy=True) if to_cpu else tensor.clone()


def load_state_dict(model: nn.Module, runtime: Runtime, state_dict: Mapping[str, Any], strict: bool = True) -> Any:
    """Load full plain tensors, or ShardTensors, by name. Collective.

    All ranks first run every module's own loading (renaming hooks, versions, extra state) without effect.

    Returns:
        torch's named tuple ``(missing_keys, unexpected_keys)``.

    Raises:
        StateDictError: raised on all ranks, with all missing, unexpected and wrongly shaped entries. Nothing has been loaded.
    """
    what = "engine.load_state_dict"
    error: Exception | None = None
    specs = {name: p._spec for name, p in named_params(runtime.units, None).items()}
    try:
        refuse_inside(runtime, what)
        found = load_on_meta(model, state_dict, strict)
        for key, value in state_dict.items():
            if key in specs and isinstance(value, torch.Tensor) and value.shape == specs[key].shape:
                found.problems.extend(misplaced(value, specs[key].part, key))
        hint = " Pass strict=False to accept missing and unexpected entries."
        where = f"rank {runtime.collectives.world_rank}: {what}: the state dict"
        found.refuse(where, hint if found.missing or found.unexpected else "")
    except Exception as problem:  # the other ranks must hear of it
        error = problem
    kinds = [(k, isinstance(v, ShardTensor)) for k, v in state_dict.items()] if error is None else None
    agree(runtime, what, kinds, error)
    given = dict(state_dict)
    for key, value in given.items():
        if isinstance(value, ShardTensor) and not _fits(specs, value):
            given[key] = value.full_tensor()  # from another engine, or for another number of ranks
    plain = with_metadata(given, state_dict)
    error = None
    result = None
    if specs.keys() <= given.keys():
        runtime.versions.restart()
    try:
        # One change, also where a module fails on one rank.
        with runtime.operations.unnoted(), runtime.versions.change():
            result = model.load_state_dict(plain, strict=strict)
    except Exception as problem:  # a module's own hook, or what it keeps in get_extra_state
        error = failed_module(f"rank {runtime.collectives.world_rank}: {what}", problem)
        error.__cause__ = problem
    runtime.parameters_loaded()
    agree(runtime, what, None, error)
    return result


def failed_module(what: str, problem: Exception) -> StateDictError:
    """Return the error for a module that has raised `problem` when its values were loaded."""
    return StateDictError(
        f"{what}: a module failed while its values were being loaded, and some have been overwritten; load again before training "
        f"goes on: {type(problem).__name__}: {problem}"
    )


def misplaced(value: Any, part: TensorPart | None, name: str) -> list[str]:
    """Return the problems of a DTensor that is not distributed like a parameter with this `part`; none for any other value."""
    try:
        if is_dtensor(value):
            part_given(value, part, name)
    except ShardError as error:
        return [str(error)]
    return []


class WithMetadata(dict):  # type: ignore[type-arg]
    """A dict that takes torch's ``_metadata`` attribute."""

    _metadata: Any


def with_metadata(values: Mapping[str, Any], like: Any) -> WithMetadata:
    """Return a state dict of these values, with the ``_metadata`` of `like` if that has any."""
    result = WithMetadata(values)
    if getattr(like, "_metadata", None) is not None:
        result._metadata = like._metadata
    return result


def _fits(specs: Mapping[str, ShardSpec], value: ShardTensor) -> bool:
    """Return True if a ShardTensor is sharded like the parameter of its name."""
    own = specs.get(without_wrappers(value._spec.name))
    return own is not None and same_cut(value._spec, own)


class Mismatches(NamedTuple):
    """The reasons why saved state does not fit: missing names, unexpected names, and texts that describe other problems."""

    missing: list[str]
    unexpected: list[str]
    problems: list[str]

    def add(self, found: Mismatches, prefix: str) -> None:
        """Add the mismatches of a part, each with a prefix."""
        for own, texts in zip(self, found, strict=True):
            own.extend(prefix + text for text in texts)

    def refuse(self, what: str, hint: str = "") -> None:
        """Raise a StateDictError that lists everything under "`what` does not fit" and `hint`, unless everything fits."""
        named = (("missing", self.missing), ("unexpected", self.unexpected))
        lines = [*(f"{kind}: {', '.join(names)}" for kind, names in named if names), *self.problems]
        if lines:
            raise StateDictError("\n  ".join([f"{what} does not fit, and nothing was loaded.{hint}", *lines]))


def load_on_meta(model: nn.Module, given: Mapping[str, Any], strict: bool) -> Mismatches:
    """Run the modules' own loading on meta tensors, where copying has no effect, and return what does not fit. Not collective.

    Without `strict`, missing and unexpected names fit.
    """
    if not isinstance(given, Mapping):
        raise StateDictError(f"a state dict is a mapping from names to tensors, not {type(given).__name__}.")
    trial = {k: _on_meta(v).data if isinstance(v, ShardTensor) or is_dtensor(v) else v for k, v in given.items()}
    metadata = getattr(given, "_metadata", None)
    missing: list[str] = []
    unexpected: list[str] = []
    problems: list[str] = []

    def visit(module: nn.Module, entries: dict[str, Any], prefix: str) -> None:
        local = {} if metadata is None else metadata.get(prefix[:-1], {})
        module._load_from_state_dict(entries, prefix, local, True, missing, unexpected, problems)
        below: dict[str, dict[str, Any]] = {}
        for key, value in entries.items():
            name, dot, _ = key[len(prefix) :].partition(".")
            if dot and key.startswith(prefix):
                below.setdefault(name, {})[key] = value
        for name, child in module._modules.items():
            if child is not None:
                visit(child, below.get(name, {}), f"{prefix}{name}.")
        if missing or unexpected:
            # Post-hooks may forgive a missing key; without missing keys they need not run.
            keys = nn.modules.module._IncompatibleKeys(missing, unexpected)
            for hook in module._load_state_dict_post_hooks.values():
                if not notes_loads(hook):  # nothing is loaded
                    hook(module, keys)

    with contextlib.ExitStack() as stack, warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")  # torch warns that copying to a meta parameter does nothing
        for module in model.modules():
            for slots in (module._parameters, module._buffers):
                stack.callback(_put_back, slots, dict(slots))
                slots.update({name: _on_meta(value) for name, value in slots.items() if value is not None})  # type: ignore[misc]
            if type(module).set_extra_state is not nn.Module.set_extra_state:
                stack.callback(_put_back, module.__dict__, dict(module.__dict__))
                module.__dict__["set_extra_state"] = lambda state: None
        visit(model, with_metadata(trial, given), "")
    if not strict:
        return Mismatches([], [], problems)
    return Mismatches(list(dict.fromkeys(missing)), list(dict.fromkeys(unexpected)), problems)


def _put_back(values: dict[str, Any], before: dict[str, Any]) -> None:
    values.clear()
    values.update(before)


def _on_meta(value: torch.Tensor) -> torch.Tensor:
    meta = torch.empty(value.shape, dtype=value.dtype, device="meta")
    if isinstance(value, (nn.Parameter, ShardTensor)):
        return nn.Parameter(meta, requires_grad=False)
    return meta
