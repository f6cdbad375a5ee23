"""Translation of the arguments of FullyShardedDataParallel and fully_shard.

Each call becomes a :class:`Request`. The requests of all wrapped modules of a model become the arguments of
:func:`torch_shard.shard`.
"""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Iterable, Mapping, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    ShardingStrategy,
)

from ..comm.process_groups import ranks_of
from ..comm.streams import accelerator, indexed
from ..config.offload import Offload
from ..config.precision import NONE, Precision
from ..errors import ConfigError, SetupError
from ..frontend.fsdp_settings import SHARDING_STRATEGIES, precision_of_policy
from ..log import logger

_FULL_IN_EVAL = "FSDP_USE_FULL_PREC_IN_EVAL"  # torch's variable


@dataclass(frozen=True)
class Request:
    """The settings that one call asks for one module.

    Attributes:
        api: the name of the function that was called, for messages.
        mesh: the ``mesh`` of :func:`torch_shard.shard`.
        strategy: a name of ``ShardConfig.strategy``; None if `reshard` decides.
        reshard: fully_shard's ``reshard_after_forward``.
        precision: the dtypes; None if nothing is cast.
        prefetch: the number of units that are gathered ahead.
        sync: True if rank 0's values are sent to all ranks.
        init_fn: a function that fills modules on the meta device.
        ignored: modules and parameters that are not sharded.
        device: the device of the shards; None for the device that the model and its mesh imply.
        offload: the settings of offload; None without it.
        arguments: the caller's arguments that can be read from the wrapped model.
    """

    api: str
    mesh: Any = None
    strategy: str | None = None
    reshard: bool | int | None = None
    precision: Precision | None = None
    prefetch: int = 1
    sync: bool = False
    init_fn: Callable[[nn.Module], None] | None = None
    ignored: tuple[nn.Module | nn.Parameter, ...] = ()
    device: torch.device | None = None
    offload: Offload | None = None
    arguments: Mapping[str, Any] = dataclasses.field(default_factory=dict)


def unused(api: str, **reasons: str) -> None:
    """Warn once that arguments or methods have no effect, with the reason for each."""
    if reasons:
        warn_once(f"{api}: without effect here: " + "; ".join(f"{name} ({why})" for name, why in reasons.items()))


@functools.cache
def warn_once(text: str) -> None:
    """Log a warning, unless the same text was logged before."""
    logger.warning("%s", text)


def _check_types(api: str, given: Mapping[str, Any], kinds: Mapping[str, type]) -> None:
    for name, kind in kinds.items():
        if given[name] is not None and not isinstance(given[name], kind):
            raise ConfigError(f"{api}: {name} must be of type {kind.__name__}, not {given[name]!r}.")


def _entries(api: str, name: str, given: Iterable[Any] | None, kinds: tuple[type, ...]) -> tuple[Any, ...]:
    found = tuple(given or ())
    for entry in found:
        if not isinstance(entry, kinds):
            wanted = " or ".join(kind.__name__ for kind in kinds)
            raise ConfigError(f"{api}: {name} must hold {wanted}, not {type(entry).__name__}.")
    return found


# -- FullyShardedDataParallel -------------------------------------------------------------------------------------------


def of_fsdp(given: Mapping[str, Any], has_policy: bool) -> Request:
    """Return the request of a call of FullyShardedDataParallel with the arguments `given`, by name.

    Raises:
        ConfigError: an argument has the wrong type, or contradicts another one.
    """
    api = "FullyShardedDataParallel"
    kinds = {"sharding_strategy": ShardingStrategy, "cpu_offload": CPUOffload, "mixed_precision": MixedPrecision}
    _check_types(api, given, kinds)
    for first, second in (("process_group", "device_mesh"), ("ignored_modules", "ignored_states")):
        if given[first] is not None and given[second] is not None:
            raise ConfigError(f"{api}: {first} and {second} mean the same thing; pass one of them.")
    backward, forward = given["backward_prefetch"], given["forward_prefetch"]
    reasons = {}
    ahead = forward or backward is BackwardPrefetch.BACKWARD_PRE
    if forward and backward is not BackwardPrefetch.BACKWARD_PRE:
        reasons[f"backward_prefetch={backward and backward.name}"] = "forward and backward prefetch alike"
    if not given["limit_all_gathers"]:
        reasons["limit_all_gathers=False"] = "no more than the prefetched units are ever gathered"
    unused(api, **reasons)
    chosen, offload = given["sharding_strategy"] or ShardingStrategy.FULL_SHARD, given["cpu_offload"]
    return Request(
        api,
        mesh=given["device_mesh"] if given["process_group"] is None else given["process_group"],
        strategy=SHARDING_STRATEGIES[chosen.name.lstrip("_")],
        precision=_precision(given["mixed_precision"], has_policy),
        prefetch=1 if ahead else 0,  # BACKWARD_POST means one gathered unit at a time
        sync=bool(given["sync_module_states"]),
        init_fn=given["param_init_fn"],
        ignored=(
            *_entries(api, "ignored_modules", given["ignored_modules"], (nn.Module,)),
            *_entries(api, "ignored_states", given["ignored_states"], (nn.Module, nn.Parameter)),
        ),
        device=_device(given["device_id"]),
        offload=Offload() if offload is not None and offload.offload_params else None,
        arguments={**given, "sharding_strategy": chosen},
    )


def _precision(mixed: MixedPrecision | None, has_policy: bool) -> Precision | None:
    if mixed is None:
        return None
    if os.environ.get(_FULL_IN_EVAL) == "1" and (mixed.param_dtype or mixed.buffer_dtype):
        raise ConfigError(
            f"FullyShardedDataParallel: {_FULL_IN_EVAL}=1 is set, and a model computes with the same dtypes in evaluation and in "
            "training here. Unset it; evaluate inside FullyShardedDataParallel.summon_full_params(model) for full precision."
        )
    # With a policy, torch wraps the modules of the classes to keep by themselves, without mixed precision.
    precision = precision_of_policy(mixed)
    return precision if has_policy else dataclasses.replace(precision, keep=())


def _device(device_id: int | torch.device | None) -> torch.device | None:
    if device_id is None:
        return None
    device = torch.device(accelerator() or "cuda", device_id) if isinstance(device_id, int) else torch.device(device_id)
    return indexed(device) if device.type == accelerator() else device


# -- fully_shard --------------------------------------------------------------------------------------------------------


def of_fully_shard(modules: list[nn.Module], given: Mapping[str, Any]) -> Request:
    """Return the request of a call of fully_shard for `modules` with the arguments `given`, by name.

    Raises:
        ConfigError: an argument has the wrong type, or asks for what the engine does not have.
    """
    api, mesh, policy, offload = "fully_shard", given["mesh"], given["mp_policy"], given["offload_policy"]
    kinds = {"mp_policy": MixedPrecisionPolicy, "offload_policy": OffloadPolicy, "reshard_after_forward": int}
    _check_types(api, given, kinds)
    if given["dp_mesh_dims"] is not None:
        raise ConfigError(
            f"{api}: dp_mesh_dims is for a mesh that has other dimensions, too. Pass the dimensions of data parallelism as mesh, "
            "mesh=whole['dp']; parameters may be DTensors over another dimension."
        )
    if mesh is not None and getattr(mesh, "ndim", 0) not in (1, 2):
        raise ConfigError(f"{api}: mesh must be a DeviceMesh of one or two dimensions, not {mesh!r}.")
    ignored = _entries(api, "ignored_params", given["ignored_params"], (nn.Parameter,))
    reasons = {}
    if given["shard_placement_fn"] is not None:
        _check_placements(api, modules, given["shard_placement_fn"], ignored)
        reasons["shard_placement_fn"] = "shards are 1-D ranges of the elements, whatever the dimensions"
    if len(modules) > 1:
        reasons["a list of modules"] = "each of them is gathered by itself"
    unused(api, **reasons)
    precision = precision_of_policy(policy)
    casts = dataclasses.replace(precision, cast_inputs=True) != NONE
    return Request(
        api,
        mesh=mesh,
        reshard=given["reshard_after_forward"],
        precision=precision if casts else None,
        ignored=ignored,
        offload=Offload(pin_memory=bool(offload.pin_memory)) if isinstance(offload, CPUOffloadPolicy) else None,
    )


def _check_placements(
    api: str, modules: list[nn.Module], placement: Callable[[nn.Parameter], Any], ignored: tuple[nn.Parameter, ...]
) -> None:
    skipped = {id(p) for p in ignored}
    for module in modules:
        for name, p in module.named_parameters():
            chosen = None if id(p) in skipped else placement(p)
            if getattr(chosen, "mesh_info", None) is not None:
                raise ConfigError(
                    f"{api}: shard_placement_fn gives {name} a mesh of its own; all parameters of a model share one. "
                    "Shard that part by itself, or leave it out with ignored_params."
                )


# -- all of one model ---------------------------------------------------------------------------------------------------


_Nested = Mapping[str, tuple[nn.Module, Request]]


def config_of(
    root: nn.Module, own: Request, nested: _Nested, filled_later: Set[int] | None = None
) -> tuple[dict[str, Any], dict[str, torch.dtype]]:
    """Return the arguments for ``shard(root, ...)``, and the dtypes of the outputs of modules inside, by name.

    Args:
        root: the outermost wrapped module.
        own: its request.
        nested: the wrapped modules inside with their requests, by name.
        filled_later: the ids of tensors that are filled after sharding; None if the model is not about to be loaded.

    Raises:
        ConfigError: the request of a module inside would give other numbers, and a model can't have both.
    """
    group = _ranks(own.mesh)
    for name, (_, request) in nested.items():
        if _ranks(request.mesh) != group:
            raise ConfigError(
                f"{request.api}: {name} is wrapped for other ranks than the model around it; a model has one mesh. Pass the "
                f"same process group or mesh to every call (here {request.mesh!r}, outside {own.mesh!r})."
            )
    requests = [own, *(request for _, request in nested.values())]
    ignored = _ignored(root, requests)
    skipped = {id(p) for entry in ignored for p in (entry.parameters() if isinstance(entry, nn.Module) else (entry,))}
    chosen = {id(m) for m, _ in nested.values() if any(id(p) not in skipped for p in m.parameters())}
    precision, outputs = _one_precision(own, nested)
    settings = {
        "prefetch": own.prefetch,
        "sync_module_states": any(request.sync for request in requests),
        "broadcast_buffers": False,  # FullyShardedDataParallel leaves each rank its own buffers
        "ignore": ignored,
        "init_fn": _init_fn([(root, own), *nested.values()], filled_later),
        "precision": precision,
        "offload": _one_offload(own, nested),
        "units": (lambda _, module: id(module) in chosen) if chosen else None,
        **_strategy(own, nested),
    }
    return settings, outputs


def _ignored(root: nn.Module, requests: list[Request]) -> tuple[nn.Module | nn.Parameter, ...]:
    modules, params = {id(m) for m in root.modules()}, {id(p) for p in root.parameters()}
    found: dict[int, nn.Module | nn.Parameter] = {}
    for request in requests:
        for entry in request.ignored:
            if id(entry) in modules or id(entry) in params:
                found[id(entry)] = entry
            elif isinstance(entry, nn.Module):  # wrapped since, or inside another model
                found.update({id(p): p for p in entry.parameters() if id(p) in params})
    return tuple(found.values())


def _init_fn(
    requests: list[tuple[nn.Module, Request]], filled_later: Set[int] | None
) -> Callable[[nn.Module], None] | None:
    """Return a function that initialises a module by the ``init_fn`` of the innermost wrapped module around it.

    A module all of whose tensors on meta are filled later gets zeros. `requests` are the wrapped modules with their requests,
    outer ones first.
    """
    # The ranks must agree on whether there is a function, even if not all of them fill something later.
    if filled_later is None and all(request.init_fn is None for _, request in requests):
        return None
    by_module = {id(m): request.init_fn for module, request in requests for m in module.modules()}
    root, _ = requests[0]
    on_meta = {
        id(m): {name: t for own in _tensors(m) for name, t in own.items() if t is not None and t.is_meta}
        for m in root.modules()
    }
    later = filled_later or ()
    waiting = {key for key, found in on_meta.items() if found and all(id(t) in later for t in found.values())}
    empty = {key: set(found) for key, found in on_meta.items()}
    names = {id(m): name for name, m in root.named_modules()}

    def initialise(module: nn.Module) -> None:
        init_fn = by_module.get(id(module))
        if id(module) in waiting:
            for own in _tensors(module):
                for name in own.keys() & empty[id(module)]:
                    own[name].zero_()
        elif init_fn is not None:
            _initialise_from_meta(module, init_fn, empty[id(module)])
        elif hasattr(module, "reset_parameters"):
            module.reset_parameters()  # type: ignore[operator]
        elif empty[id(module)] & module._buffers.keys():
            raise SetupError(
                f"module {names[id(module)]} holds buffers on the meta device, to which no load gives values. Give it a "
                "reset_parameters(), fill the buffers or call model.to_empty() before the load, or pass param_init_fn=."
            )

    return initialise


def _tensors(module: nn.Module) -> tuple[dict[str, Any], dict[str, Any]]:
    return module._parameters, module._buffers


def _initialise_from_meta(module: nn.Module, init_fn: Callable[[nn.Module], None], empty: set[str]) -> None:
    """Call `init_fn` on a module whose `empty` tensors are on meta, as torch does, and keep the values in their own memory.

    The tensors have memory already. ``to_empty()`` puts them in, and the values of any other replacement are copied to them.
    """
    places = [(own, name, own[name]) for own in _tensors(module) for name in own if name in empty]

    def to_empty(*, device: Any = None, recurse: bool = True) -> nn.Module:
        for own, name, tensor in places:
            tensor.zero_()
            own[name] = tensor
        return module

    for own, name, tensor in places:
        twin = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")
        own[name] = nn.Parameter(twin, tensor.requires_grad) if own is module._parameters else twin
    module.__dict__["to_empty"] = to_empty
    try:
        init_fn(module)
        for own, name, tensor in places:
            if own[name].is_meta:
                raise SetupError(
                    f"param_init_fn has left {name!r} of {type(module).__name__} on the meta device; it must call "
                    "module.to_empty(device=..., recurse=False) and then give the values."
                )
            if own[name] is not tensor:
                tensor.copy_(own[name])
    finally:
        del module.__dict__["to_empty"]
        for own, name, tensor in places:
            own[name] = tensor


def _one_precision(own: Request, nested: _Nested) -> tuple[Precision | None, dict[str, torch.dtype]]:
    if own.precision is None and all(request.precision is None for _, request in nested.values()):
        return None, {}
    base = own.precision or NONE
    plain = dataclasses.replace(base, output_dtype=None, keep=())
    keep: list[str] = []
    outputs: dict[str, torch.dtype] = {}
    for name, (_, request) in nested.items():
        asked = request.precision or NONE
        if asked.output_dtype is not None:
            outputs[name] = asked.output_dtype
        inside_kept = any(name.startswith(f"{outer}.") for outer in keep)
        if dataclasses.replace(asked, output_dtype=None, keep=()) == plain and not inside_kept:
            continue
        if asked.param_dtype is None and asked.reduce_dtype is None and not asked.keep_low_precision_grads:
            keep.append(name)
            continue
        raise ConfigError(
            f"{request.api}: mixed precision of {name} ({asked}) differs from that of the model around it ({base}). A model has "
            "one; give the outermost call the same, and single modules none, which keeps them as they are stored."
        )
    return dataclasses.replace(base, keep=(*base.keep, *keep)), outputs


def _one_offload(own: Request, nested: _Nested) -> Offload | None:
    """Return the model's offload. If any wrapped module asks for it, the full model gets it, since results don't depend on it."""
    asked = {"the outermost module": own.offload, **{name: request.offload for name, (_, request) in nested.items()}}
    chosen = [offload for offload in asked.values() if offload is not None]
    if not chosen:
        return None
    without = [name for name, offload in asked.items() if offload is None]
    if without:
        unused(own.api, **{f"no offload of {', '.join(without)}": "a model is offloaded as a whole"})
    return Offload(pin_memory=all(offload.pin_memory for offload in chosen))


def _strategy(own: Request, nested: _Nested) -> dict[str, Any]:
    if own.strategy is not None:
        other = [name for name, (_, r) in nested.items() if r.strategy not in (None, own.strategy)]
        if other:
            unused(own.api, **{"sharding_strategy of " + ", ".join(other): f"the whole model has {own.strategy!r}"})
        return {"strategy": own.strategy}
    hybrid = getattr(own.mesh, "ndim", 1) == 2
    # FSDP2's default at the root (False) only says that the root is used again at once; it is no request to keep memory.
    asked = {name: True if r.reshard is None else r.reshard for name, (_, r) in nested.items()}
    values = list(asked.values()) or [True if own.reshard is None else own.reshard]
    ranks = {v for v in values if not isinstance(v, bool)}
    if len(ranks) > 1:
        raise ConfigError(
            f"{own.api}: reshard_after_forward has several numbers of ranks, {sorted(ranks)}; a model has one."
        )
    settings: dict[str, Any] = {"reshard_after_forward": ranks.pop() if ranks else None}
    if any(v is not False for v in values):
        settings["strategy"] = "hybrid_shard" if hybrid else "full_shard"
        names = ", ".join(name for name, value in asked.items() if value is False)
        if names:
            reason = "the unit that is used last is kept for backward anyway"
            unused(own.api, **{f"reshard_after_forward=False of {names}": reason})
    else:
        settings["strategy"] = "hybrid_shard_zero2" if hybrid else "shard_grad_op"
    return settings


def _ranks(mesh: Any) -> Any:
    """Return a value that is equal for meshes over the same ranks, shared in the same way."""
    if mesh is None:
        return tuple(ranks_of())
    if isinstance(mesh, (tuple, list)):
        return tuple(_ranks(group) for group in mesh)
    if hasattr(mesh, "get_group"):
        return tuple(mesh.mesh.flatten().tolist()) if mesh.ndim == 1 else tuple(map(tuple, mesh.mesh.tolist()))
    return tuple(ranks_of(mesh))
