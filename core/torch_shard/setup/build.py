"""The set-up of a sharded model from a plain one, in five steps: plan, agree, allocate, fill, register.

A failure of one rank is a failure of all ranks, and changes nothing (:mod:`.undo`). So all that may fail on one rank alone (user
code, reading files, taking memory) comes before the ranks agree for the last time. Most of it comes while parameters that have
values are still unsharded. These are flattened after that, unit by unit, so that the model shrinks as its shards grow.

Two votes are always needed: on the plans, because later messages depend on them, and on the outcome. Others come where a rank
that has failed would be missing in a collective: before the values of each flat buffer are broadcast or freed.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from ..comm.broadcast_buffers import broadcast, coalesce
from ..comm.collectives import outside_inference
from ..comm.communicators import connect
from ..comm.mesh import resolve_mesh
from ..config.autocast_params import is_cast_by_size
from ..config.offload import offload_of
from ..config.precision import precision_of
from ..config.shard_config import ShardConfig
from ..errors import ConfigError, SetupError
from ..layout.dtensor_placement import is_dtensor, placed_of
from ..log import logger
from ..numerics.stochastic_rounding import Rounding
from ..offload import memory_limits
from ..offload.host import Host
from ..plan.plan import Plan
from ..plan.planner import make_plan
from ..runtime import mixed_precision_hooks, plain_pickles
from ..runtime.buffer_sync import BufferSync
from ..runtime.forward_hooks import register, unregister
from ..runtime.load_hooks import note_loads
from ..runtime.registry import engine_of
from ..runtime.runtime import Runtime
from ..unit.module_params import rebuild_flat_weights
from ..unit.unit import Unit
from .checks import SETUP, agree, by_name_of, check_model
from .flatten import empty_flat, flatten, groups_of, swap_in
from .lazy_param import deferred_of
from .lazy_values import refuse_altered
from .meta_init import Materialiser, one_random_state, random_state, set_random_state
from .shared import Group, Setup
from .undo import Swapped


def build(model: nn.Module, config: ShardConfig, mesh: Any) -> tuple[Runtime, Plan]:
    """Shard `model` in place. Collective.

    The caller may be inside ``inference_mode``: the model can be trained afterwards.
    """
    with outside_inference():
        setup = _plan(model, config, mesh)
        _agree(setup)
        with setup.undo:
            setup.undo.callback(setup.collectives.drop_spares)
            setup.undo.note_modules(model)
            try:
                _allocate(setup)
                _fill(setup)
                _register(setup)
            except BaseException as error:
                # If a rank is absent, the consensus raises an error on this rank that other ranks may not raise.
                own = error is setup.error or isinstance(error, SetupError)
                setup.undo.all_failed = own or setup.collectives.world == 1
                setup.error = None  # its traceback refers to this frame
                raise
            setup.undo.pop_all()  # nothing has failed
    return setup.runtime, setup.plan


# -- plan: decide what is to be done, and check that it can be done. Nothing changes --------------------------------------


def _plan(model: nn.Module, config: ShardConfig, mesh: Any) -> Setup:
    """Connect the ranks, plan the units, and check that the model can be sharded. Collective."""
    if not isinstance(model, nn.Module):
        raise SetupError(f"model must be a torch.nn.Module, not {type(model).__name__}.")
    setup = Setup(model, config, connect(resolve_mesh(mesh, model, config), config))
    setup.attempt(_plan_units, setup)
    return setup


def _plan_units(setup: Setup) -> None:
    model, config, c = setup.model, setup.config, setup.collectives
    if engine_of(model) is not None:
        raise SetupError("the model is already sharded; close() its engine before sharding it again.")
    setup.plan = plan = make_plan(model, config, c.size)
    check_model(model, plan, c.device, c.world_rank)
    precision = precision_of(config.precision)
    precision.check_device(c.device)
    precision.check_rounding(info.dtypes.stored for info in plan.params if info.requires_grad)
    if config.quantized is not None:
        config.quantized.check_device(c.device)
        if c.size == 1 < c.data_parallel_size:
            raise ConfigError(
                f"quantized: each rank holds all parameters (strategy {config.strategy!r}, shard_size 1), so that nothing is "
                "gathered, and gradients are all-reduced, which would round each sum once more. Leave it out."
            )
    setup.params = by_name_of(model)
    setup.modules = dict(model.named_modules())
    refuse_altered(setup.params, c.world_rank)
    setup.placed = {info.name: placed_of(setup.params[info.name], info.name) for info in plan.params}
    setup.groups = [groups_of(unit, c.size, setup.placed) for unit in plan.units]


# -- agree: compare the ranks' plans, and find out which ranks have values -------------------------------------------------


def _agree(setup: Setup) -> None:
    """Raise on all ranks unless all have equal plans; find out which parameters have values on which ranks. Collective."""
    c = setup.collectives
    agree(c, setup.model, setup.plan if setup.error is None else None, setup.config, setup.error)
    if c.service is not None:
        c.service.met()
    params = {info.name: setup.params[info.name] for info in setup.plan.params}
    # A parameter that waits for values from files counts as one with values, because every rank reads them.
    here = [p.device.type != "meta" or deferred_of(p) is not None for p in params.values()]
    first = [h and c.world_rank == 0 for h in here]
    seed = (torch.initial_seed() & ((1 << 63) - 1) if c.world_rank == 0 else 0).to_bytes(8, "little")
    message = torch.tensor([*here, *first, *seed], dtype=torch.uint8, device="cpu")
    if c.world > 1:
        c.maximum(message, SETUP)
    answer, n = message.tolist(), len(params)
    setup.with_values, setup.sent = (
        {name for name, is_so in zip(params, answer[at : at + n], strict=True) if is_so} for at in (0, n)
    )
    setup.seed = int.from_bytes(bytes(answer[2 * n :]), "little")
    setup.on_meta = [setup.with_values.isdisjoint(i.name for i in unit.params) for unit in setup.plan.units]


# -- allocate: take memory for parameters that have none ------------------------------------------------------------------


def _allocate(setup: Setup) -> None:
    """Take host memory, and memory for the full values of some parameters on meta. Collective.

    Memory for shards on the device is taken when they get their values, unit by unit.
    """
    model, config, c = setup.model, setup.config, setup.collectives
    offload = offload_of(config.offload)
    if offload is not None:
        # The memory that the model takes now is free only when all of it is sharded, so it is not available.
        memory_limits.check(setup.plan.predicted.host_at_setup, c)
        setup.host = Host(offload, c)
        setup.attempt(setup.host.open)
    setup.runtime = Runtime(config, c, setup.host)
    setup.undo.callback(_abandon, setup)
    if setup.host is not None:
        names = [unit.name for unit in setup.plan.units]
        setup.shards = setup.attempt(setup.host.take_shards, setup.groups, names) or {}
    for index, unit_plan in enumerate(setup.plan.units):
        unit = Unit(unit_plan.name, index, setup.runtime)
        unit.triggers += [setup.modules[name] for name in unit_plan.triggers]
    setup.materialiser = Materialiser(model, config, c, setup.undo)
    for module in model.modules():
        if isinstance(module, nn.RNNBase):  # its weak references to the weights would make a swap impossible
            module._flat_weight_refs, module._flat_weights = [], []
    setup.attempt(_allocate_full, setup)


def _allocate_full(setup: Setup) -> None:
    """Allocate full values for parameters on meta that are initialised in units with other parameters that have values.

    They are initialised like those of a plain model. Where rank 0's broadcast fills the unit, this rank need not do it, unless
    the same module holds parameters of a unit without values.
    """
    rank, sends = setup.collectives.world_rank, setup.config.sync_module_states
    units = list(zip(setup.plan.units, setup.on_meta, strict=True))
    fresh = {owner for unit, on_meta in units if on_meta for info in unit.params for owner, _ in info.owners}
    for unit, on_meta in units:
        owners = {info.name: {owner for owner, _ in info.owners} for info in unit.params}
        empty = {
            info.name: p
            for info in unit.params
            if (p := setup.params[info.name]).device.type == "meta" and deferred_of(p) is None
        }
        distributed = next((name for name, p in empty.items() if is_dtensor(p)), None)
        if on_meta:
            if distributed is not None and setup.materialiser.sends:
                raise SetupError(
                    f"parameter {distributed} is a DTensor on the meta device, and with init_fn the values of rank 0 are sent to "
                    "all ranks, which have other parts of the parameter. If init_fn does the same on all ranks, pass "
                    "sync_module_states=False; else leave it out, or initialise the model before shard()."
                )
            continue
        for name in empty:
            if name in setup.with_values and not (name in setup.sent and sends):
                raise SetupError(
                    f"rank {rank}: parameter {name} is on the meta device here and has values on another "
                    "rank; rank 0 must be the one that has them, with sync_module_states=True."
                )
        if distributed is not None:
            raise SetupError(
                f"rank {rank}: parameter {distributed} is a DTensor on the meta device, and others of its unit, or on "
                "other ranks, are not. Leave the whole model on meta, on every rank, or give all of it memory and values."
            )
        for name, p in empty.items():
            if sends and rank > 0 and fresh.isdisjoint(owners[name]):
                continue
            memory = torch.empty_strided(p.shape, p.stride(), dtype=p.dtype, device=setup.collectives.device)
            full = nn.Parameter(memory, requires_grad=p.requires_grad)
            full.__dict__.update(p.__dict__)
            _replace(setup, p, full)
            setup.given.add(name)


def _replace(setup: Setup, param: nn.Parameter, other: nn.Parameter) -> None:
    """Swap the content of the user's parameter for that of `other`, a plain parameter."""
    swapped = Swapped.about_to(param, other)
    torch.utils.swap_tensors(param, other)
    setup.undo.callback(swapped.swap_back)


def _abandon(setup: Setup) -> None:
    """Drop the units, the shards and the host memory of a failed set-up."""
    for unit in setup.runtime.units:
        unit.flats.clear()
        unit.places.clear()
    setup.runtime.units.clear()
    setup.shards.clear()
    if setup.host is not None:
        setup.host.leave(setup.runtime)


# -- fill: take values from user code, from files, from the model, and from rank 0 ---------------------------------------


def _fill(setup: Setup) -> None:
    """Fill the shards, and swap them into the parameters; raise on all ranks if one has failed by now. Collective.

    Parameters on meta and parameters with values in files come first, because filling them changes no values.
    """
    c, config = setup.collectives, setup.config
    units = list(zip(setup.runtime.units, setup.groups, setup.on_meta, strict=True))
    filled = [
        (unit, group) for unit, groups, on_meta in units for group in groups if not on_meta and not _waits(setup, group)
    ]
    setup.undo.callback(set_random_state, c.device, random_state(c.device))
    setup.attempt(_initialise_full, setup)
    sends = config.sync_module_states and any(setup.on_meta)
    shared = random_state(c.device) if sends else []
    coalesced = setup.attempt(coalesce, c, shared)
    if sends:
        setup.together()
    with one_random_state(c, shared, coalesced):
        for unit, groups, on_meta in units:
            setup.attempt(_enter_fresh, setup, unit, [g for g in groups if on_meta or _waits(setup, g)])
            if on_meta:
                _initialise(setup, unit, groups)
        setup.attempt(_fill_ignored, setup)
        setup.attempt(setup.materialiser.rest, setup.model)
    setup.attempt(setup.filler.fill)
    setup.attempt(setup.materialiser.check)
    for unit, group in filled:
        flatten(setup, unit, group)
    setup.attempt(setup.materialiser.rest, setup.model)
    setup.attempt(setup.filler.fill)
    setup.attempt(_finish_units, setup)
    setup.attempt(_prepare_buffers, setup)
    setup.together()


def _waits(setup: Setup, group: Group) -> bool:
    """Return True if all parameters of a group have their values in files."""
    return all(deferred_of(setup.params[info.name]) is not None for info in group[0])


def _initialise_full(setup: Setup) -> None:
    """Initialise parameters without values on any rank in units that have other parameters with values."""
    for unit in setup.plan.units:
        missing = [i for i in unit.params if i.name in setup.given and i.name not in setup.with_values]
        owners = [setup.modules[name] for info in missing for name, _ in info.owners]
        setup.materialiser.fill_plain({info.name: setup.params[info.name] for info in missing}, owners)


def _initialise(setup: Setup, unit: Unit, groups: list[Group]) -> None:
    """Initialise the parameters of a unit that is on meta. Collective where rank 0's values are sent."""
    owners = [setup.modules[name] for infos, _ in groups for info in infos for name, _ in info.owners]
    setup.attempt(setup.materialiser.initialise, unit, owners)
    if setup.materialiser.sends_all_of(unit):
        setup.together()
    if setup.error is None:
        setup.materialiser.keep(unit)


def _enter_fresh(setup: Setup, unit: Unit, groups: Iterable[Group]) -> None:
    """Shard groups of parameters that have no values yet."""
    for group in groups:
        flat = empty_flat(setup, unit, group)
        for info in group[0]:
            setup.filler.note(setup.params[info.name])
        swap_in(setup, unit, flat, group, setup.undo.note_flat(flat, has_values=False))


def _fill_ignored(setup: Setup) -> None:
    """Read the values of ignored parameters from files; raise for one on meta without values."""
    for name in setup.plan.ignored:
        param = setup.params[name]
        values = deferred_of(param)
        if values is not None:
            _replace(setup, param, setup.filler.full(param, values, setup.collectives.device))
        elif param.device.type == "meta":
            raise SetupError(f"ignored parameter {name} is on the meta device; give it memory before shard().")


def _finish_units(setup: Setup) -> None:
    """Give the units the dtypes in which they compute, and their stochastic rounding."""
    precision = precision_of(setup.config.precision)
    for unit in setup.runtime.units:
        for number, flat in enumerate(unit.flats):
            if precision.rounds(flat.dtype):
                flat.rounding = Rounding(setup.seed, (unit.index, number))
        unit.compute_in_its_dtypes()
    for module in setup.model.modules():
        if isinstance(module, nn.RNNBase):
            rebuild_flat_weights(module)


def _prepare_buffers(setup: Setup) -> None:
    """Copy the buffers to the device, in their dtype, and allocate memory for the broadcast of rank 0's values."""
    model, config, c = setup.model, setup.config, setup.collectives
    precision = precision_of(config.precision)
    kept = {id(b) for module in precision.kept_modules(model) for b in module.buffers()}
    ignored = {id(b) for entry in config.ignore if isinstance(entry, nn.Module) for b in entry.buffers()}
    made: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            new = made.get(id(buffer), buffer)
            if id(buffer) not in made:
                if id(buffer) not in kept and buffer.is_floating_point() and buffer.element_size() > 1:
                    new = new.to(dtype=precision.buffer_dtype)
                made[id(buffer)] = new = new.to(c.device) if new.device.type == "cpu" else new
            setup.buffers.append((module, name, new))
    setup.rank_own = frozenset(name for name, b in model.named_buffers() if id(b) in ignored)
    setup.has_buffers = any(number not in ignored for number in made)
    if config.sync_module_states and c.world > 1:
        setup.coalesced = coalesce(c, [new for number, new in made.items() if number not in ignored])


# -- register: install buffers and hooks --------------------------------------------------------------------------------


def _register(setup: Setup) -> None:
    """Install the buffers, and hooks on the modules. Collective. This fails only if a rank is lost."""
    model, config, c, runtime = setup.model, setup.config, setup.collectives, setup.runtime
    c.drop_spares()
    setup.undo.callback(unregister, model, runtime.units)
    for module, name, buffer in setup.buffers:
        module._buffers[name] = buffer
    if setup.coalesced:
        broadcast(c, setup.coalesced, "the broadcast of buffers from rank 0", within_data_parallel=True)
    if setup.has_buffers and c.world > 1 and config.broadcast_buffers:
        runtime.buffers = BufferSync(c, setup.rank_own)
    runtime.ready()
    runtime.name_as_new()
    runtime.registrations.ignored = frozenset(setup.plan.ignored)
    mixed_precision_hooks.register(model, runtime.units, precision_of(config.precision))
    register(model, runtime, runtime.units)
    for unit, unit_plan in zip(runtime.units, setup.plan.units, strict=True):
        note_loads(runtime, unit, {name: setup.modules[name] for info in unit_plan.params for name, _ in info.owners})
    plain_pickles.follow()
    setup.filler.tell()
    logger.info("sharded %d parameters in %d units over %d ranks", len(setup.plan.params), len(runtime.units), c.size)
    _tell_of_casts(setup)


def _tell_of_casts(setup: Setup) -> None:
    """Log which parameters are computed with in the dtype of autocast only because they are large."""
    if precision_of(setup.config.precision).cast_params != "autocast":
        return
    found = [
        info
        for info in setup.plan.params
        if info.dtypes.casts and any(is_cast_by_size(setup.modules[owner], info.shape) for owner, _ in info.owners)
    ]
    if found:
        names = ", ".join(info.name for info in found[:3]) + (f" and {len(found) - 3} more" if len(found) > 3 else "")
        logger.info(
            "gathered in %s because of the size alone: %s. That suits operands of matrix products, such as stacked weights of "
            "experts. If a module uses one otherwise (x + self.positions), name the module in Precision.keep.",
            found[0].dtypes.compute,
            names,
        )
