"""From a plain model to a sharded one: every check first, on all ranks together, then unit by unit in place."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ..comm.broadcast_buffers import broadcast_coalesced
from ..comm.collectives import Collectives, outside_inference
from ..comm.communicators import connect
from ..comm.mesh import resolve_mesh
from ..config.offload import Offload, offload_of
from ..config.precision import Precision, precision_of
from ..config.shard_config import ShardConfig
from ..errors import CheckpointError, ConfigError, HostMemoryError, SetupError
from ..layout.dtensor_placement import Placed, is_dtensor, local_of, placed_of
from ..layout.flat_layout import FlatLayout, ParamMeta
from ..log import logger
from ..numerics.stochastic_rounding import Rounding
from ..offload.host import Host
from ..offload.memory_check import check_memory, open_host, take_shards
from ..plan.plan import ParamInfo, Plan, UnitPlan
from ..plan.planner import make_plan
from ..runtime import mixed_precision_hooks
from ..runtime.buffer_sync import BufferSync
from ..runtime.forward_hooks import register
from ..runtime.load_hooks import note_loads
from ..runtime.registry import engine_of
from ..runtime.runtime import Runtime
from ..shard_tensor.spec import slice_part
from ..shard_tensor.tensor import ShardTensor
from ..unit.flat_buffer import FlatBuffer
from ..unit.unit import Unit, adopt, rebuild_flat_weights
from .checks import SETUP, agree, by_name_of, check_model
from .lazy_param import deferred_of
from .lazy_values import Filler, refuse_altered
from .meta_init import Materialiser, one_random_state


def build(model: nn.Module, config: ShardConfig, mesh: Any) -> tuple[Runtime, Plan]:
    """Shard `model` in place. Collective. Under ``inference_mode``, too: training may follow an evaluation that came first."""
    with outside_inference():
        return _build(model, config, mesh)


def _build(model: nn.Module, config: ShardConfig, mesh: Any) -> tuple[Runtime, Plan]:
    if not isinstance(model, nn.Module):
        raise SetupError(f"model must be a torch.nn.Module, not {type(model).__name__}.")
    where = resolve_mesh(mesh, model, config)
    device = where.device
    c = connect(
        where.group,
        device,
        where.topology,
        timeout=config.timeout,
        single_communicator=config.single_communicator,
        again=where.again,
    )
    plan: Plan | None = None
    error: Exception | None = None
    try:
        if engine_of(model) is not None:
            raise SetupError("the model is already sharded; close() its engine before sharding it again.")
        plan = make_plan(model, config, c.size)
        check_model(model, plan, device, c.world_rank)
        precision_of(config.precision).check_device(device)
        precision_of(config.precision).check_rounding(info.dtypes.stored for info in plan.params if info.requires_grad)
        if config.quantized is not None:
            config.quantized.check_device(device)
            if c.size == 1 < c.averaged:
                raise ConfigError(
                    f"quantized: each rank holds a whole copy (strategy {config.strategy!r}, shard_size 1), so that nothing is "
                    "gathered, and gradients are all-reduced, which would round each sum once more. Leave it out."
                )
        by_name = by_name_of(model)
        refuse_altered(by_name, c.world_rank)
        placed = {info.name: placed_of(by_name[info.name], info.name) for info in plan.params}
        layouts = [_layouts(unit, c.size, placed) for unit in plan.units]
    except Exception as problem:  # every rank must hear of it before it is raised
        error = problem
    agree(c, model, plan, error, config)
    assert plan is not None
    precision = precision_of(config.precision)
    host, shards = _host(offload_of(config.offload), model, plan, layouts, c)
    runtime = Runtime(config, c, host)
    modules = dict(model.named_modules(remove_duplicate=False))
    params = by_name_of(model)
    rnns = [m for m in model.modules() if isinstance(m, nn.RNNBase)]
    for rnn in rnns:  # their weak references to the weights would make the swap impossible
        rnn._flat_weight_refs, rnn._flat_weights = [], []
    materialiser, filler = Materialiser(model, config, c), Filler()
    on_meta: list[bool] = []
    error = None
    try:
        on_meta = _units_on_meta(model, plan, params, materialiser, c)
    except SetupError as problem:
        error = problem
    agree(c, model, plan, error)
    try:
        with one_random_state(c, config.sync_module_states and any(on_meta)):
            for index, (unit_plan, groups) in enumerate(zip(plan.units, layouts, strict=True)):
                unit = Unit(unit_plan.name, index, c, host)
                runtime.add(unit)
                for infos, layout in groups:
                    place = shards.get(id(layout))
                    _flatten(unit, infos, layout, placed, params, modules, config, c, on_meta[index], filler, place)
                if on_meta[index]:
                    materialiser.initialise(unit, [modules[m] for p in unit_plan.params for m, _ in p.owners])
                unit.triggers = [modules[name] for name in unit_plan.triggers]
            filler.fill_ignored([params[name] for name in plan.ignored], device)
            materialiser.rest(model)
        filler.fill()  # last, and without collectives: a file that can't be read on one rank leaves no other rank in one
        for rnn in rnns:
            rebuild_flat_weights(rnn)
        materialiser.check()
        if precision.stochastic_rounding:
            _round_steps(runtime, precision)
        for unit in runtime.units:
            unit.compute_in_its_dtypes()
    except (SetupError, CheckpointError, HostMemoryError) as problem:
        error = problem
    agree(c, model, plan, error)
    c.drop_spares()
    if precision.buffer_dtype is not None:
        mixed_precision_hooks.convert_buffers(model, precision.buffer_dtype)
    _buffers(model, config, runtime, c, device)
    runtime.ready()
    runtime.number_as_new()
    runtime.registrations.ignored = frozenset(plan.ignored)
    mixed_precision_hooks.register(model, runtime.units, precision)
    register(model, runtime, runtime.units)
    for unit, unit_plan in zip(runtime.units, plan.units, strict=True):
        note_loads(unit, {name: modules[name] for info in unit_plan.params for name, _ in info.owners})
    logger.info("sharded %d parameters in %d units over %d ranks", len(plan.params), len(plan.units), c.size)
    return runtime, plan


def _host(
    offload: Offload | None,
    model: nn.Module,
    plan: Plan,
    groups: list[list[tuple[list[ParamInfo], FlatLayout]]],
    c: Collectives,
) -> tuple[Host | None, dict[int, torch.Tensor]]:
    """Where shards are to be that are not on the device, with memory for all of them, by id of the layouts. Collective."""
    if offload is None:
        return None, {}
    check_memory(plan, c)
    host, error = open_host(offload, c)
    shards: dict[int, torch.Tensor] = {}
    try:
        if error is None:
            shards = take_shards(host, groups, [unit.name for unit in plan.units])
    except Exception as problem:
        error = problem
    agree(c, model, plan, error)
    return host, shards


def _round_steps(runtime: Runtime, precision: Precision) -> None:
    """Give what is stored in bf16 its random numbers, by the seed of the first rank's generator. Collective."""
    c, seed = runtime.collectives, torch.initial_seed() & ((1 << 63) - 1)
    if c.world > 1:
        first = torch.tensor([seed if c.world_rank == 0 else -1], dtype=torch.int64, device="cpu")
        c.maximum(first, SETUP)
        seed = int(first)
    for unit in runtime.units:
        for number, flat in enumerate(unit.flats):
            if precision.rounds(flat.dtype):
                flat.rounding = Rounding(seed, (unit.index, number))


def _layouts(
    unit: UnitPlan, size: int, placed: Mapping[str, Placed | None]
) -> list[tuple[list[ParamInfo], FlatLayout]]:
    """Of this rank's parts, where tensor parallelism cuts parameters; those have flat buffers of their own, since other ranks
    share them than share the rest."""

    def meta(info: ParamInfo) -> ParamMeta:
        own = placed[info.name]
        return (
            ParamMeta(info.name, info.shape, info.stride)
            if own is None
            else ParamMeta(info.name, own.sizes, own.own_stride)
        )

    return [
        (list(infos), FlatLayout.build(map(meta, infos), infos[0].dtypes.smallest, size)) for infos in unit.flat_buffers
    ]


# -- flattening ---------------------------------------------------------------------------------------------------------


def _flatten(
    unit: Unit,
    infos: list[ParamInfo],
    layout: FlatLayout,
    placed: Mapping[str, Placed | None],
    params: dict[str, nn.Parameter],
    modules: dict[str, nn.Module],
    config: ShardConfig,
    c: Collectives,
    on_meta: bool,
    filler: Filler,
    place: torch.Tensor | None,
) -> None:
    """`place`: memory for the shard, if it is not to be on the device."""
    dtypes = infos[0].dtypes
    waiting = [filler.note(params[info.name]) for info in infos]
    if on_meta or all(waiting):
        shard = place
        if shard is None:
            shard = torch.empty(layout.shard_numel, dtype=dtypes.stored, device=c.device)
        for start, stop in _own_gaps(layout, c.rank):
            shard[start:stop].zero_()
    else:
        shard = _filled(unit, infos, layout, params, config, c)
        if place is not None:
            shard = place.copy_(shard)
    flat = FlatBuffer(layout, dtypes, shard, c, unit, [placed[info.name] for info in infos], unit.host)
    unit.flats.append(flat)
    for index, info in enumerate(infos):
        original = params[info.name]
        _swap(original, flat, index, unit)
        for module, attribute in info.owners:
            unit.places.append((modules[module], attribute, flat, index))
    flat.mirror(force=True)


def _own_gaps(layout: FlatLayout, rank: int) -> list[tuple[int, int]]:
    first, last = layout.rank_range(rank)
    cut = [(max(start, first) - first, min(stop, last) - first) for start, stop in layout.gaps()]
    return [(start, stop) for start, stop in cut if stop > start]


def _filled(
    unit: Unit,
    infos: list[ParamInfo],
    layout: FlatLayout,
    params: dict[str, nn.Parameter],
    config: ShardConfig,
    c: Collectives,
) -> torch.Tensor:
    """This rank's slice of the parameters' present values, or of rank 0's."""
    dtype = infos[0].dtype
    full = c.take(layout.numel, dtype)
    with torch.no_grad():
        for start, stop in layout.gaps():
            full[start:stop].zero_()
        for info, slot in zip(infos, layout.slots, strict=True):
            place = torch.as_strided(full, slot.shape, slot.stride, slot.offset)
            if deferred_of(params[info.name]) is None:
                place.copy_(local_of(params[info.name]).data)
            else:  # every rank reads its slice of it later
                place.zero_()
        if config.sync_module_states:
            what = f"the broadcast of unit {unit.name!r}'s parameters from rank 0"
            broadcast_coalesced(c, [full], what, within_plane=infos[0].ways > 1)
        n, stored = layout.shard_numel, infos[0].dtypes.stored
        if c.size == 1 and stored == dtype:
            return full
        own = full.narrow(0, c.rank * n, n)
        shard = own.clone() if stored == dtype else own.to(stored)
    c.give(full)
    return shard


def _units_on_meta(
    model: nn.Module, plan: Plan, params: dict[str, nn.Parameter], materialiser: Materialiser, c: Collectives
) -> list[bool]:
    """Collective. Which units are on meta as a whole, on every rank: those are initialised as shards.

    In the others, parameters that are on meta everywhere are initialised whole, and those that rank 0 has values for
    get memory, for its broadcast.
    """
    names = [i.name for unit in plan.units for i in unit.params]
    # What waits for values from files has them, on every rank.
    here = [params[n].device.type != "meta" or deferred_of(params[n]) is not None for n in names]
    real = torch.tensor([*here, *(h and c.world_rank == 0 for h in here)], dtype=torch.uint8)
    if c.world > 1 and len(real):
        c.maximum(real, SETUP)
    answer = [bool(r) for r in real.tolist()]
    somewhere = dict(zip(names, answer[: len(names)], strict=True))
    on_first = dict(zip(names, answer[len(names) :], strict=True))
    sends = materialiser.config.sync_module_states
    modules = dict(model.named_modules(remove_duplicate=False))
    on_meta: list[bool] = []
    for unit in plan.units:
        on_meta.append(not any(somewhere[i.name] for i in unit.params))
        if on_meta[-1]:
            distributed = [i.name for i in unit.params if is_dtensor(params[i.name])]
            if distributed and materialiser.sends:
                raise SetupError(
                    f"parameter {distributed[0]} is a DTensor on the meta device, and with init_fn what rank 0 makes of "
                    "parameters is sent to all ranks, which have other parts of it. Where init_fn does the same on all ranks, "
                    "pass sync_module_states=False; else leave it out, or initialise the model before shard()."
                )
            continue
        for info in unit.params:
            if somewhere[info.name] and not (on_first[info.name] and sends) and not here[names.index(info.name)]:
                raise SetupError(
                    f"rank {c.world_rank}: parameter {info.name} is on the meta device here and has values on another "
                    "rank; rank 0 must be the one that has them, with sync_module_states=True."
                )
        empty = [i for i in unit.params if params[i.name].device.type == "meta" and deferred_of(params[i.name]) is None]
        distributed = [i.name for i in empty if is_dtensor(params[i.name])]
        if distributed:
            raise SetupError(
                f"rank {c.world_rank}: parameter {distributed[0]} is a DTensor on the meta device, and others of its unit, or on "
                "other ranks, are not. Leave the whole model on meta, on every rank, or give all of it memory and values."
            )
        for info in empty:
            p = params[info.name]
            memory = torch.empty_strided(p.shape, p.stride(), dtype=p.dtype, device=c.device)
            replacement = nn.Parameter(memory, requires_grad=p.requires_grad)
            replacement.__dict__.update(p.__dict__)
            torch.utils.swap_tensors(p, replacement)
        missing = [i for i in empty if not somewhere[i.name]]
        materialiser.fill_plain(
            {i.name: params[i.name] for i in missing}, [modules[m] for i in missing for m, _ in i.owners]
        )
    return on_meta


def _swap(original: nn.Parameter, flat: FlatBuffer, index: int, unit: Unit) -> None:
    """Put the sharded parameter inside the user's own object: identity, attributes, hooks and `.grad` stay."""
    sharded = flat.params[index]
    name = flat.layout.slots[index].name
    adopt(sharded, original)
    grad = original.grad
    hooks = original._backward_hooks
    post = getattr(original, "_post_accumulate_grad_hooks", None)
    if hooks:
        unit.tensor_hooks[name] = hooks
        original._backward_hooks = None  # type: ignore[assignment]
    if post:
        unit.post_hooks[name] = post
        original._post_accumulate_grad_hooks = None  # type: ignore[assignment]
    original.grad = None
    try:
        torch.utils.swap_tensors(original, sharded)
    except RuntimeError as error:
        raise SetupError(
            f"parameter {name} can't be swapped for its shard: {error}; use ShardConfig(ignore=...)."
        ) from error
    flat.params[index] = original  # type: ignore[call-overload]
    with torch._C.DisableTorchFunctionSubclass():
        if flat.dtypes.grad != flat.dtype:
            original.grad_dtype = flat.dtypes.grad
        if grad is not None:
            spec = original._spec  # type: ignore[attr-defined]
            own = slice_part(flat.part_of(grad, index), spec)
            original.grad = ShardTensor(own.clone().to(flat.memory.device, flat.dtypes.grad), spec)


def _buffers(model: nn.Module, config: ShardConfig, runtime: Runtime, c: Collectives, device: torch.device) -> None:
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.device != device and buffer.device.type == "cpu":
                module._buffers[name] = buffer.to(device)
    found = {id(b) for entry in config.ignore if isinstance(entry, nn.Module) for b in entry.buffers()}
    ignored = frozenset(name for name, b in model.named_buffers(remove_duplicate=False) if id(b) in found)
    buffers = [b for name, b in model.named_buffers() if name not in ignored]
    if not buffers or c.world == 1:
        return
    if config.sync_module_states:
        broadcast_coalesced(c, buffers, "the broadcast of buffers from rank 0", within_plane=True)
    if config.broadcast_buffers:
        runtime.buffers = BufferSync(model, c, ignored)
