"""The way of parameters into flat shards: they are grouped, the shards are allocated, and the values copied."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from ..comm.broadcast_buffers import broadcast_coalesced
from ..errors import SetupError
from ..layout.dtensor_placement import Placed, local_of
from ..layout.flat_layout import FlatLayout, ParamMeta, slot_view
from ..numerics.dtypes import widens
from ..plan.plan import ParamInfo, UnitPlan
from ..shard_tensor.spec import shard_of_part
from ..shard_tensor.tensor import ShardTensor
from ..unit.flat_buffer import FlatBuffer
from ..unit.module_params import adopt
from ..unit.unit import Unit
from .shared import Group, Setup
from .undo import Swapped


def groups_of(unit: UnitPlan, size: int, placed: Mapping[str, Placed | None]) -> list[Group]:
    """Return the groups of a unit's parameters that share a flat buffer, with their layouts.

    If tensor parallelism cuts parameters, the layouts are of this rank's parts. Such parameters have flat buffers of their own,
    because they are shared by other ranks than the rest.
    """

    def meta(info: ParamInfo) -> ParamMeta:
        own = placed[info.name]
        shape, stride = (info.shape, info.stride) if own is None else (own.sizes, own.own_stride)
        return ParamMeta(info.name, shape, stride)

    return [
        (list(infos), FlatLayout.build(map(meta, infos), infos[0].dtypes.smallest, size)) for infos in unit.flat_buffers
    ]


def empty_flat(setup: Setup, unit: Unit, group: Group) -> FlatBuffer:
    """Return a flat buffer of `unit` with an uninitialised shard, but zeros between the parameters. Not collective."""
    infos, layout = group
    c, dtypes = setup.collectives, infos[0].dtypes
    shard = setup.shards.get(id(layout))
    if shard is None:
        shard = torch.empty(layout.shard_numel, dtype=dtypes.stored, device=c.device)
    flat = FlatBuffer(layout, dtypes, shard, unit, [setup.placed[info.name] for info in infos])
    for start, stop in flat.gaps:
        shard[start:stop].zero_()
    return flat


def swap_in(setup: Setup, unit: Unit, flat: FlatBuffer, group: Group, swapped: list[Swapped]) -> None:
    """Swap the parameters of `flat` into the user's objects, and append each of these to `swapped`. Not collective."""
    unit.flats.append(flat)
    for index, info in enumerate(group[0]):
        original = setup.params[info.name]
        swapped.append(_swap(original, flat, index, unit))
        for module, attribute in info.owners:
            unit.places.append((setup.modules[module], attribute, flat, index))
    flat.mirror(force=True)


def flatten(setup: Setup, unit: Unit, group: Group) -> None:
    """Shard a group of parameters with the values of each rank, or with those of rank 0. Collective.

    The full values are in one buffer, which is freed before the next group is flattened.
    """
    c, infos = setup.collectives, group[0]
    made = setup.attempt(_with_values, setup, unit, group)
    try:
        # A rank without memory would be missing in the broadcast, or where freed values are gathered after a failure.
        setup.together()
    except BaseException:
        del made  # the traceback would keep its memory, which the undoing needs
        raise
    flat, full = made
    del made
    if setup.config.sync_module_states:
        what = f"the broadcast of unit {unit.name!r}'s parameters from rank 0"
        broadcast_coalesced(c, [full], what, within_data_parallel=infos[0].ways > 1)
    if full is not flat.memory:
        flat.memory.copy_(flat.own_slot(full))
    del full
    swapped = setup.undo.note_flat(flat, has_values=True)
    setup.attempt(swap_in, setup, unit, flat, group, swapped)
    for info, each in zip(infos, swapped, strict=False):
        # Shards in a narrower dtype could not give the values back.
        exact = info.dtypes.stored == info.dtype or widens(info.dtype, info.dtypes.stored)
        moves = setup.host is not None or local_of(each.before).device != c.device
        if info.name in setup.given or (exact and not moves):
            each.free()


def _with_values(setup: Setup, unit: Unit, group: Group) -> tuple[FlatBuffer, torch.Tensor]:
    """Return a flat buffer and the full values of this rank: in new memory, or in the shard if it holds all of them."""
    infos, layout = group
    dtype, flat = infos[0].dtype, empty_flat(setup, unit, group)
    full = flat.memory
    if flat.sharded or flat.host is not None or full.dtype != dtype:
        full = torch.empty(layout.numel, dtype=dtype, device=setup.collectives.device)
    for start, stop in layout.gaps():
        full[start:stop].zero_()
    for info, slot in zip(infos, layout.slots, strict=True):
        place = slot_view(full, slot)
        param = setup.params[info.name]
        if param.device.type != "meta":
            place.copy_(local_of(param).data)
        else:  # rank 0 sends the values, or every rank reads its shard later
            place.zero_()
            setup.filler.note(param)
    return flat, full


def _swap(original: nn.Parameter, flat: FlatBuffer, index: int, unit: Unit) -> Swapped:
    """Swap the sharded parameter into the user's object, which keeps its identity, attributes, hooks and `.grad`."""
    sharded = flat.params[index]
    name = flat.layout.slots[index].name
    adopt(sharded, original)
    swapped = Swapped.about_to(original, sharded)
    own = None
    if swapped.grad is not None:
        spec = sharded._spec
        own = shard_of_part(flat.part_of(swapped.grad, index), spec).clone().to(flat.memory.device, flat.dtypes.grad)
        own = ShardTensor(own, spec)
    if swapped.hooks:
        unit.tensor_hooks[name] = swapped.hooks
        original._backward_hooks = None  # type: ignore[assignment]
    if swapped.post_hooks:
        unit.post_hooks[name] = swapped.post_hooks
        original._post_accumulate_grad_hooks = None  # type: ignore[assignment]
    original.grad = None
    try:
        torch.utils.swap_tensors(original, sharded)
    except RuntimeError as error:
        swapped.put_back()
        raise SetupError(
            f"parameter {name} can't be swapped for its shard: {error}; use ShardConfig(ignore=...)."
        ) from error
    flat.params[index] = original  # type: ignore[call-overload]
    with torch._C.DisableTorchFunctionSubclass():
        if flat.dtypes.grad != flat.dtype:
            original.grad_dtype = flat.dtypes.grad
        if own is not None:
            original.grad = own
    return swapped
