"""From the arguments of FullyShardedDataParallel and of fully_shard to a :class:`Request`, and from the requests of all wrapped
modules of one model to a :class:`~torch_shard.config.shard_config.ShardConfig`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
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
from ..config.offload import Offload
from ..config.precision import NONE, Precision
from ..errors import ConfigError
from ..log import logger

__all__ = ["Request", "config_of", "of_fsdp", "of_fully_shard", "unused"]

_STRATEGIES = {
    ShardingStrategy.FULL_SHARD: "full_shard",
    ShardingStrategy.SHARD_GRAD_OP: "shard_grad_op",
    ShardingStrategy.NO_SHARD: "no_shard",
    ShardingStrategy.HYBRID_SHARD: "hybrid_shard",
    ShardingStrategy._HYBRID_SHARD_ZERO2: "hybrid_shard_zero2",
}


@dataclass(frozen=True)
class Request:
    """What one call asks for one module.

    Attributes:
        api: the name of what was called, for messages.
        mesh: as for :func:`torch_shard.shard`.
        strategy: a name of ``ShardConfig.strategy``; None where `reshard` decides.
        reshard: fully_shard's ``reshard_after_forward``.
        precision: None where nothing is cast.
        prefetch: units gathered ahead.
        sync: send rank 0's values.
        init_fn: fills modules on the meta device.
        ignored: modules and parameters.
        device: where the shards shall be; None for wherever the model and its mesh say.
        offload: what lies in host memory; None for nothing.
        arguments: what the caller gave, as far as it can be read again from the wrapped model.
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


_said: set[str] = set()


def unused(api: str, **reasons: str) -> None:
    """Name arguments, or methods, that have no effect here, and why. Once for each text."""
    if not reasons:
        return
    text = f"{api}: without effect here: " + "; ".join(f"{name} ({why})" for name, why in reasons.items())
    if text not in _said:
        _said.add(text)
        logger.warning("%s", text)


# -- FullyShardedDataParallel -------------------------------------------------------------------------------------------


def of_fsdp(
    process_group: Any,
    sharding_strategy: ShardingStrategy | None,
    cpu_offload: CPUOffload | None,
    has_policy: bool,
    backward_prefetch: BackwardPrefetch | None,
    mixed_precision: MixedPrecision | None,
    ignored_modules: Iterable[nn.Module] | None,
    param_init_fn: Callable[[nn.Module], None] | None,
    device_id: int | torch.device | None,
    sync_module_states: bool,
    forward_prefetch: bool,
    limit_all_gathers: bool,
    ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | None,
    device_mesh: Any,
) -> Request:
    """The arguments of FullyShardedDataParallel.

    Raises:
        ConfigError: one that can't be kept, or is of the wrong type; it is named.
    """
    api = "FullyShardedDataParallel"
    chosen = ShardingStrategy.FULL_SHARD if sharding_strategy is None else sharding_strategy
    if chosen not in _STRATEGIES:
        raise ConfigError(f"{api}: sharding_strategy must be a ShardingStrategy, not {chosen!r}.")
    if cpu_offload is not None and not isinstance(cpu_offload, CPUOffload):
        raise ConfigError(f"{api}: cpu_offload must be a CPUOffload, not {cpu_offload!r}.")
    if process_group is not None and device_mesh is not None:
        raise ConfigError(f"{api}: process_group and device_mesh say the same thing; pass one of them.")
    if mixed_precision is not None and not isinstance(mixed_precision, MixedPrecision):
        raise ConfigError(f"{api}: mixed_precision must be a MixedPrecision, not {type(mixed_precision).__name__}.")
    if param_init_fn is not None and not callable(param_init_fn):
        raise ConfigError(f"{api}: param_init_fn must be callable, not {type(param_init_fn).__name__}.")
    if ignored_modules is not None and ignored_states is not None:
        raise ConfigError(f"{api}: ignored_modules and ignored_states say the same thing; pass one of them.")
    reasons = {}
    if backward_prefetch is BackwardPrefetch.BACKWARD_POST:
        reasons["backward_prefetch=BACKWARD_POST"] = "the next unit is gathered while the present one computes"
    elif backward_prefetch is None and forward_prefetch:
        reasons["backward_prefetch=None"] = "forward and backward prefetch alike"
    if not limit_all_gathers:
        reasons["limit_all_gathers=False"] = "no more than the prefetched units are ever gathered"
    unused(api, **reasons)
    return Request(
        api,
        mesh=device_mesh if process_group is None else process_group,
        strategy=_STRATEGIES[chosen],
        precision=_precision(mixed_precision, has_policy),
        prefetch=0 if backward_prefetch is None and not forward_prefetch else 1,
        sync=bool(sync_module_states),
        init_fn=param_init_fn,
        ignored=(
            *_entries(api, "ignored_modules", ignored_modules, (nn.Module,)),
            *_entries(api, "ignored_states", ignored_states, (nn.Module, nn.Parameter)),
        ),
        device=_device(api, device_id),
        offload=Offload() if cpu_offload is not None and cpu_offload.offload_params else None,
        arguments={"sharding_strategy": chosen, "mixed_precision": mixed_precision, "process_group": process_group},
    )


def _precision(mixed: MixedPrecision | None, has_policy: bool) -> Precision | None:
    if mixed is None:
        return None
    # torch wraps the modules of these classes by themselves where a policy is given, and nowhere else.
    keep = tuple(mixed._module_classes_to_ignore or ()) if has_policy and mixed.param_dtype is not None else ()
    return Precision(
        param_dtype=mixed.param_dtype,
        reduce_dtype=mixed.reduce_dtype,
        buffer_dtype=mixed.buffer_dtype,
        cast_inputs=True if mixed.cast_forward_inputs else "root" if mixed.cast_root_forward_inputs else False,
        keep=keep,
        keep_low_precision_grads=mixed.keep_low_precision_grads,
    )


def _device(api: str, device_id: int | torch.device | None) -> torch.device | None:
    if device_id is None:
        return None
    device = torch.device("cuda", device_id) if isinstance(device_id, int) else torch.device(device_id)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", torch.cuda.current_device())
    if device.type not in ("cpu", "cuda"):
        raise ConfigError(f"{api}: device_id is {device}; shards can be on the CPU and on CUDA devices.")
    return device


def _entries(api: str, name: str, given: Any, kinds: tuple[type, ...]) -> tuple[Any, ...]:
    if given is None:
        return ()
    if isinstance(given, (nn.Module, torch.Tensor)) or not isinstance(given, Iterable):
        raise ConfigError(f"{api}: {name} must be an iterable, not {type(given).__name__}.")
    found = tuple(given)
    for entry in found:
        if not isinstance(entry, kinds):
            wanted = " or ".join(kind.__name__ for kind in kinds)
            raise ConfigError(f"{api}: {name} must hold {wanted}, not {type(entry).__name__}.")
    return found


# -- fully_shard --------------------------------------------------------------------------------------------------------


def of_fully_shard(
    modules: list[nn.Module],
    mesh: Any,
    reshard_after_forward: bool | int | None,
    shard_placement_fn: Callable[[nn.Parameter], Any] | None,
    mp_policy: MixedPrecisionPolicy,
    offload_policy: Any,
    ignored_params: Iterable[nn.Parameter] | None,
    dp_mesh_dims: Any,
) -> Request:
    """The arguments of fully_shard.

    Raises:
        ConfigError: one that can't be kept, or is of the wrong type; it is named.
    """
    api = "fully_shard"
    if not isinstance(mp_policy, MixedPrecisionPolicy):
        raise ConfigError(f"{api}: mp_policy must be a MixedPrecisionPolicy, not {type(mp_policy).__name__}.")
    if not isinstance(offload_policy, OffloadPolicy | None):
        raise ConfigError(
            f"{api}: offload_policy must be an OffloadPolicy or a CPUOffloadPolicy, not {type(offload_policy).__name__}."
        )
    if reshard_after_forward is not None and not isinstance(reshard_after_forward, int):
        raise ConfigError(
            f"{api}: reshard_after_forward must be True, False, a number of ranks or None, not {reshard_after_forward!r}."
        )
    if dp_mesh_dims is not None:
        raise ConfigError(
            f"{api}: dp_mesh_dims is for a mesh that has other dimensions, too. Pass those of data parallelism as mesh, "
            "mesh=whole['dp']; parameters may be DTensors over another one."
        )
    if mesh is not None and getattr(mesh, "ndim", 0) not in (1, 2):
        raise ConfigError(f"{api}: mesh must be a DeviceMesh of one or two dimensions, not {mesh!r}.")
    ignored = _entries(api, "ignored_params", ignored_params, (nn.Parameter,))
    reasons = {}
    if shard_placement_fn is not None:
        _check_placements(api, modules, shard_placement_fn, ignored)
        reasons["shard_placement_fn"] = "parameters are cut in flat slices, wherever their dimensions are"
    if len(modules) > 1:
        reasons["a list of modules"] = "each of them is gathered by itself"
    unused(api, **reasons)
    policy = mp_policy
    casts = any((policy.param_dtype, policy.reduce_dtype, policy.output_dtype))
    return Request(
        api,
        mesh=mesh,
        reshard=reshard_after_forward,
        precision=Precision(
            param_dtype=policy.param_dtype,
            reduce_dtype=policy.reduce_dtype,
            output_dtype=policy.output_dtype,
            cast_inputs=policy.cast_forward_inputs,
        )
        if casts
        else None,
        ignored=ignored,
        offload=Offload(pin_memory=bool(offload_policy.pin_memory))
        if isinstance(offload_policy, CPUOffloadPolicy)
        else None,
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


def config_of(
    root: nn.Module, own: Request, nested: Mapping[str, tuple[nn.Module, Request]]
) -> tuple[dict[str, Any], dict[str, torch.dtype]]:
    """The settings of ``shard(root, ...)``, and the modules whose outputs are cast to a dtype besides, by name.

    Args:
        root: the outermost wrapped module.
        own: what was asked for it.
        nested: likewise, for the wrapped modules inside, by name.

    Raises:
        ConfigError: what was asked for a module inside would give other numbers, and one model can't have both.
    """
    settings: dict[str, Any] = {
        "prefetch": own.prefetch,
        "sync_module_states": own.sync or any(request.sync for _, request in nested.values()),
        # FullyShardedDataParallel leaves each rank its own buffers.
        "broadcast_buffers": False,
        "ignore": _ignored(root, [own, *(request for _, request in nested.values())]),
        "init_fn": _init_fn(root, own, nested),
    }
    settings["precision"], outputs = _one_precision(own, nested)
    settings["offload"] = _one_offload(root, own, nested)
    settings.update(_strategy(own, nested))
    group = _ranks(own.mesh)
    for name, (_, request) in nested.items():
        if _ranks(request.mesh) != group:
            raise ConfigError(
                f"{request.api}: {name} is wrapped for other ranks than the model around it; a model has one mesh. Pass the "
                f"same process group or mesh to every call (here {request.mesh!r}, outside {own.mesh!r})."
            )
    skipped = {id(p) for entry in settings["ignore"] for p in _params(entry)}
    chosen = {id(m) for m, _ in nested.values() if any(id(p) not in skipped for p in m.parameters())}
    settings["units"] = Wrapped(chosen) if chosen else None
    return settings, outputs


class Wrapped:
    """``ShardConfig.units``: the wrapped modules."""

    def __init__(self, modules: set[int]) -> None:
        self.modules = modules

    def __call__(self, name: str, module: nn.Module) -> bool:
        return id(module) in self.modules


def _params(entry: nn.Module | nn.Parameter) -> Iterable[nn.Parameter]:
    return entry.parameters() if isinstance(entry, nn.Module) else (entry,)


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
    root: nn.Module, own: Request, nested: Mapping[str, tuple[nn.Module, Request]]
) -> Callable[[nn.Module], None] | None:
    asked = [(root, own), *(pair for pair in nested.values())]  # outer ones first
    if all(request.init_fn is None for _, request in asked):
        return None
    by_module = {id(m): request.init_fn for module, request in asked for m in module.modules()}
    return InitByModule(by_module)


class InitByModule:
    """``ShardConfig.init_fn``: that of the innermost wrapped module around each."""

    def __init__(self, by_module: dict[int, Callable[[nn.Module], None] | None]) -> None:
        self.by_module = by_module

    def __call__(self, module: nn.Module) -> None:
        init_fn = self.by_module.get(id(module))
        if init_fn is not None:
            # torch's param_init_fn begins with to_empty(). Here the module has memory already, and must keep it.
            module.__dict__["to_empty"] = _Keep(module)
            try:
                init_fn(module)
            finally:
                del module.__dict__["to_empty"]
        elif hasattr(module, "reset_parameters"):
            module.reset_parameters()  # type: ignore[operator]


class _Keep:
    """In place of ``to_empty``, of what one module holds itself: zeros, for whoever loads values later."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, *, device: Any, recurse: bool = True) -> nn.Module:
        for tensor in (*self.module._parameters.values(), *self.module._buffers.values()):
            if tensor is not None:
                tensor.zero_()
        return self.module


def _one_precision(
    own: Request, nested: Mapping[str, tuple[nn.Module, Request]]
) -> tuple[Precision | None, dict[str, torch.dtype]]:
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
            f"{request.api}: mixed precision of {name} ({_shown(asked)}) differs from that of the model around it "
            f"({_shown(base)}). A model has one; give the outermost call the same, and single modules none, which keeps them as "
            "they are stored."
        )
    return dataclasses.replace(base, keep=(*base.keep, *keep)), outputs


def _one_offload(root: nn.Module, own: Request, nested: Mapping[str, tuple[nn.Module, Request]]) -> Offload | None:
    """Of the whole model where it is asked for any part of it: no number depends on it, and less fits without."""
    asked = {"the outermost module": own, **{name: request for name, (_, request) in nested.items()}}
    chosen = {name: request.offload for name, request in asked.items() if request.offload is not None}
    if not chosen:
        return None
    (first, offload), *others = chosen.items()
    for name, other in others:
        if other != offload:
            raise ConfigError(
                f"{asked[name].api}: {name} is offloaded with pin_memory={other.pin_memory}, and {first} with "
                f"pin_memory={offload.pin_memory}; a model has one. Give all calls the same policy."
            )
    inside = {id(p) for module, _ in nested.values() for p in module.parameters()}
    without = [name for name, (_, request) in nested.items() if request.offload is None]
    if own.offload is None and any(id(p) not in inside for p in root.parameters()):
        without.insert(0, "the outermost module")
    if without:
        unused(own.api, **{f"no offload of {', '.join(without)}": f"{first} is offloaded, and a model is as a whole"})
    return offload


def _shown(precision: Precision) -> str:
    fields = ("param_dtype", "reduce_dtype", "buffer_dtype", "cast_inputs", "keep_low_precision_grads")
    return ", ".join(f"{field}={getattr(precision, field)}" for field in fields)


def _strategy(own: Request, nested: Mapping[str, tuple[nn.Module, Request]]) -> dict[str, Any]:
    if own.strategy is not None:
        other = [name for name, (_, r) in nested.items() if r.strategy not in (None, own.strategy)]
        if other:
            unused(own.api, **{"sharding_strategy of " + ", ".join(other): f"the whole model has {own.strategy!r}"})
        return {"strategy": own.strategy}
    hybrid = getattr(own.mesh, "ndim", 1) == 2
    # The root's own default, False, says when it is used, not how much may be kept.
    asked = {name: True if r.reshard is None else r.reshard for name, (_, r) in nested.items()}
    values = list(asked.values()) or [True if own.reshard is None else own.reshard]
    ranks = {v for v in values if not isinstance(v, bool)}
    if len(ranks) > 1:
        raise ConfigError(
            f"{own.api}: reshard_after_forward has several numbers of ranks, {sorted(ranks)}; a model has one."
        )
    kept = [v for v in values if v is False]
    settings: dict[str, Any] = {}
    if len(kept) == len(values):
        settings["strategy"] = "hybrid_shard_zero2" if hybrid else "shard_grad_op"
    else:
        settings["strategy"] = "hybrid_shard" if hybrid else "full_shard"
        if kept:
            names = ", ".join(name for name, value in asked.items() if value is False)
            unused(
                own.api, **{f"reshard_after_forward=False of {names}": "what is used last is kept for backward anyway"}
            )
    if ranks:
        settings["reshard_after_forward"] = ranks.pop()
    return settings


def _ranks(mesh: Any) -> Any:
    """Equal for meshes over the same ranks, shared in the same way."""
    if mesh is None:
        return tuple(ranks_of())
    if isinstance(mesh, (tuple, list)):
        return tuple(_ranks(group) for group in mesh)
    if hasattr(mesh, "get_group"):
        return tuple(mesh.mesh.flatten().tolist()) if mesh.ndim == 1 else tuple(map(tuple, mesh.mesh.tolist()))
    return tuple(ranks_of(mesh))
