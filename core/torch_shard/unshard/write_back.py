"""The write-back at the end of ``engine.gathered(write=True)``: changes of full parameters go back into the shards."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from ..comm.consensus import agree
from ..errors import DivergenceError, MissingRankError, ShardError
from ..runtime.registry import runtime_of
from ..runtime.runtime import Runtime
from ..shard_tensor.spec import shard_of_part
from ..shard_tensor.unsharded_param import is_view, memory_of, own_grad
from ..unit.flat_buffer import FlatBuffer
from ..unit.full_values import full_flat
from ..unit.unit import Unit
from .full_values import broadcast_bytes, scatter_shards, set_grad, unify_replicas


@dataclass(frozen=True)
class Request:
    """The arguments of one ``gathered``; `ranks` is sorted, and None means all."""

    write: bool
    ranks: tuple[int, ...] | None
    device: torch.device
    grads: bool

    def names(self, rank: int) -> bool:
        return self.ranks is None or rank in self.ranks

    def same_place(self, other: Request) -> bool:
        return self.ranks == other.ranks and self.device == other.device


@dataclass(eq=False)
class Summons:
    """One unit inside one ``gathered``.

    There is one also on ranks that get no values, so that all ranks decide on nested calls alike.
    """

    unit: Unit
    request: Request
    in_place: bool  # the unit's own full buffer and leaves serve; else copies do
    here: bool  # this rank gets the values
    shared: bool = False  # the enclosing gathered() has the values already
    keep: bool = False  # a running backward needs the unit afterwards
    overlay: bool = False  # copies on top of an enclosing in-place gathered()
    unsharded_params: list[list[nn.Parameter]] = field(
        default_factory=list
    )  # the parameters in the modules, by flat buffer
    buffers: list[torch.Tensor] = field(default_factory=list)  # the memory of `leaves`, by flat buffer
    covered: list[list[nn.Parameter]] = field(default_factory=list)  # each flat.unsharded_params from before
    wants: list[list[bool]] = field(default_factory=list)  # requires_grad of `leaves` at the beginning
    hooks: list[Any] = field(default_factory=list)  # handles of the hooks that refuse a backward
    backup: list[torch.Tensor] = field(
        default_factory=list
    )  # the shards' values before, where the leaves view the shards


def open_on(unit: Unit) -> list[Summons]:
    """Return the running gathered() calls that hold `unit`, the innermost last."""
    stack: list[Summons] = unit.summons
    return stack


# -- writing back -----------------------------------------------------------------------------------------------------


def write_back(runtime: Runtime, entered: list[Summons], failed: bool) -> None:
    """Write the values back into the shards, on every rank or on none. Collective.

    Args:
        runtime: of the engine.
        entered: the units inside this gathered().
        failed: an exception is on its way out of the gathered().

    Raises:
        ShardError: a value can't be written back, on this rank or another one.
    """
    problem: Exception | None = None
    running = sys.exc_info()[1]
    if failed:
        if not isinstance(running, Exception) or isinstance(running, (MissingRankError, DivergenceError)):
            return  # the ranks are out of step already, or this rank is being stopped
        problem = ShardError(
            f"{type(running).__name__} inside engine.gathered(write=True), so no rank writes anything: {running}"
        )
    else:
        try:
            for summons in entered:
                if summons.here:
                    _settle(summons)
        except Exception as error:
            problem = error
    try:
        agree(runtime, "the end of engine.gathered(write=True)", None, problem)
    except ShardError:
        if failed:
            return  # the exception that is already on its way says more
        raise
    done: set[int] = set()
    for summons in entered:
        if id(summons.unit) not in done:
            done.add(id(summons.unit))
            _write(summons)


def _settle(summons: Summons) -> None:
    """Copy values that were assigned (``weight.data = merged``) into the buffer.

    Raises:
        ShardError: a value does not fit, or a module holds another parameter.
    """
    for flat, leaves, buffer in zip(summons.unit.flats, summons.unsharded_params, summons.buffers, strict=True):
        for i, leaf in enumerate(leaves):
            view = flat.view(buffer, i)
            if is_view(leaf, view):
                continue
            if memory_of(leaf).shape != view.shape or leaf.dtype != view.dtype:
                raise ShardError(
                    f"rank {flat.collectives.world_rank}: {flat.layout.slots[i].name} became {leaf.dtype} of shape "
                    f"{tuple(leaf.shape)} inside engine.gathered(write=True); {view.dtype} of shape "
                    f"{tuple(view.shape)} can't hold it. engine.close() the model, change it, and shard again."
                )
            with torch.no_grad():
                view.copy_(memory_of(leaf).detach())
    for module, attribute, flat, index in summons.unit.places:
        held = module._parameters.get(attribute)
        leaf = summons.unsharded_params[summons.unit.flats.index(flat)][index]
        if held is not leaf:
            raise ShardError(
                f"rank {flat.collectives.world_rank}: {flat.layout.slots[index].name} was replaced by another "
                "parameter inside engine.gathered(write=True), so its values can't be written back. Copy into it (with "
                "torch.no_grad(): p.copy_(new)), or engine.close() the model, change it, and shard again."
            )


def _write(summons: Summons) -> None:
    unit, request = summons.unit, summons.request
    what = f"the write-back of unit {unit.name!r}"
    with torch.no_grad():
        for number, flat in enumerate(unit.flats):
            if request.ranks is not None:
                scatter_shards(
                    flat, summons.buffers[number] if summons.here else None, flat.shard, request.ranks[0], what
                )
            else:
                if not summons.in_place or flat.gathers:  # else the buffer is the shard
                    flat.shard.copy_(flat.own_slot(summons.buffers[number]))
                unify_replicas(flat, what)
            unit.outdated = True  # a collective does not increment the shard's version
            if flat.host is not None:
                flat.host.outdate()
            if summons.overlay and flat.gathers:
                flat.full.copy_(full_flat(flat, what))
            for enclosing in open_on(unit):  # these edits stay, also if an enclosing gathered() undoes its own
                if enclosing.backup:
                    enclosing.backup[number].copy_(flat.shard)
            if not summons.in_place:
                for leaf in summons.covered[number] if summons.covered else flat.unsharded_params:
                    # Backward of a graph that was recorded before must raise, and not use other values.
                    torch.autograd.graph.increment_version(leaf)
            if request.grads:
                _write_grads(summons, number, flat)


def _of_first_replica(
    unit: Unit, flat: FlatBuffer, slices: list[torch.Tensor | None], what: str
) -> list[torch.Tensor | None]:
    """Return the first replica's `slices` of gradients, since each replica may have edited or dropped its own. Collective."""
    held = torch.tensor([s is not None for s in slices], dtype=torch.uint8, device="cpu")
    broadcast_bytes(runtime_of(unit), held, 0, what)
    own = torch.zeros(flat.layout.shard_numel, dtype=flat.dtypes.grad, device=flat.shard.device)
    ranges = [flat.layout.local_range(i, flat.collectives.rank) for i in range(len(slices))]
    for local, (start, stop) in zip(slices, ranges, strict=True):
        if local is not None:
            own[start:stop].copy_(local)
    unify_replicas(flat, what, own)
    return [own[start:stop] if has else None for has, (start, stop) in zip(held.tolist(), ranges, strict=True)]


def _write_grads(summons: Summons, number: int, flat: FlatBuffer) -> None:
    request, unit = summons.request, summons.unit
    what = f"the write-back of the gradients of unit {unit.name!r}"
    grads = [own_grad(leaf) for leaf in summons.unsharded_params[number]] if summons.here else [None] * len(flat.params)
    if request.ranks is None:
        slices = [
            None if g is None else shard_of_part(flat.part_of(g.detach(), p._spec.index), p._spec).to(flat.shard.device)
            for p, g in zip(flat.params, grads, strict=True)
        ]
        topology = flat.collectives.topology
        if topology.replicas > 1 or topology.data_parallel_groups > 1:
            slices = _of_first_replica(unit, flat, slices, what)
        for param, local in zip(flat.params, slices, strict=True):
            set_grad(param, None if local is None else local.clone())
        return
    source = request.ranks[0]
    held = torch.tensor([0 if g is None else 1 for g in grads], dtype=torch.uint8)
    held = broadcast_bytes(runtime_of(unit), held, source, what)
    if not held.any():
        for param in flat.params:
            set_grad(param, None)
        return
    full = None
    if summons.here:
        full = torch.zeros(flat.layout.numel, dtype=flat.dtypes.grad, device=request.device)
        for i, grad in enumerate(grads):
            if grad is not None:
                flat.view(full, i).copy_(grad)
    own = torch.empty(flat.layout.shard_numel, dtype=flat.dtypes.grad, device=flat.shard.device)
    scatter_shards(flat, full, own, source, what)
    for i, param in enumerate(flat.params):
        start, stop = flat.layout.local_range(i, flat.collectives.rank)
        set_grad(param, own[start:stop].clone() if held[i] else None)
