"""The write-back at the end of ``engine.gathered(write=True)``: changes of full parameters go back into the shards."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

from ..comm.consensus import agree
from ..errors import DivergenceError, MissingRankError, ShardError
from ..layout.dtensor_placement import local_of
from ..runtime.runtime import Runtime
from ..shard_tensor.aliases import leave_values
from ..shard_tensor.unsharded_param import is_view, move, own_grad
from ..unit.flat_buffer import FlatBuffer
from ..unit.full_values import full_flat
from ..unit.unit import Unit
from ..utils.pytree import storage_of
from .scattered_values import scatter_shards, set_grad, unify_replicas


class Request(NamedTuple):
    """The arguments of one ``gathered``; `ranks` is sorted, and None means all."""

    write: bool
    ranks: tuple[int, ...] | None
    device: torch.device
    grads: bool

    def same_place(self, other: Request) -> bool:
        """Return True if the same ranks get the values, on the same device."""
        return (self.ranks, self.device) == (other.ranks, other.device)


@dataclass(eq=False)
class GatheredUnit:
    """One unit inside one ``gathered``.

    Ranks that get no values have one, too, so that all ranks decide on nested calls alike.

    Attributes:
        unit: the gathered unit.
        request: the call's arguments.
        in_place: True if the unit's own full buffers and unsharded parameters are used, False for copies.
        here: True if this rank gets the values.
        shared: True if the enclosing ``gathered`` has the values already.
        overlay: True if the enclosing ``gathered`` gives all ranks the values, and copies of these take their place meanwhile.
        keep: True if the unit stays unsharded on this rank.
        refill: the unit's `refill` afterwards, if it stays unsharded.
        unsharded_params: the parameters in the modules, by flat buffer.
        buffers: the memory of these parameters, by flat buffer.
        covered: the former ``unsharded_params`` of each flat buffer.
        wants: ``requires_grad`` of `unsharded_params` at the beginning.
        hooks: handles of the hooks that refuse a backward.
        backup: the values of `buffers` at the beginning, or as written since; empty where the buffers are freed at the end.
    """

    unit: Unit
    request: Request
    in_place: bool
    here: bool
    shared: bool = False
    overlay: bool = False
    keep: bool = False
    refill: bool = False
    unsharded_params: list[list[nn.Parameter]] = field(default_factory=list)
    buffers: list[torch.Tensor] = field(default_factory=list)
    covered: list[list[nn.Parameter]] = field(default_factory=list)
    wants: list[list[bool]] = field(default_factory=list)
    hooks: list[Any] = field(default_factory=list)
    backup: list[torch.Tensor] = field(default_factory=list)


def write_back(runtime: Runtime, entered: list[GatheredUnit], failed: bool) -> None:
    """Write the values back into the shards, on every rank or on none. Collective.

    Args:
        runtime: the engine's runtime.
        entered: the units inside this ``gathered``.
        failed: True if the body of the ``gathered`` has raised an exception.

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
            settle([gathered for gathered in entered if gathered.here])
        except Exception as error:
            problem = error
    try:
        agree(runtime, "the end of engine.gathered(write=True)", None, problem)
    except ShardError:
        if failed:
            return  # the exception that is already on its way says more
        raise
    for gathered in entered:
        _write(gathered)
    runtime.versions.note_change()


def settle(entered: Sequence[GatheredUnit]) -> None:
    """Copy values that were assigned (``weight.data = merged``) into the buffers. Not collective.

    Raises:
        ShardError: a value does not fit, or a module holds another parameter.
    """
    assigned: list[tuple[nn.Parameter, torch.Tensor]] = []
    for gathered in entered:
        assigned += _assigned(gathered)
    # After `a.data, b.data = b.data, a.data` each value lies in the other's place, which is written to.
    written = {storage_of(view) for _, view in assigned}
    values = [local_of(param).detach() for param, _ in assigned]
    values = [value.clone() if storage_of(value) in written else value for value in values]
    with torch.no_grad():
        for (param, view), value in zip(assigned, values, strict=True):
            view.copy_(value)
            if storage_of(param) in written:
                move(param, view)


def _assigned(gathered: GatheredUnit) -> list[tuple[nn.Parameter, torch.Tensor]]:
    """Return the parameters that were assigned values, each with its place in the buffer."""
    unit = gathered.unit
    found = []
    for flat, params, buffer in zip(unit.flats, gathered.unsharded_params, gathered.buffers, strict=True):
        for i, param in enumerate(params):
            view = flat.view(buffer, i)
            if is_view(param, view):
                continue
            if local_of(param).shape != view.shape or param.dtype != view.dtype:
                raise ShardError(
                    f"rank {flat.collectives.world_rank}: {flat.layout.slots[i].name} became {param.dtype} of shape "
                    f"{tuple(param.shape)} inside engine.gathered(); {view.dtype} of shape "
                    f"{tuple(view.shape)} can't hold it. engine.close() the model, change it, and shard again."
                )
            found.append((param, view))
            if gathered.request.ranks is None:
                leave_values(flat.params[i])
    for module, attribute, flat, index in unit.places:
        if module._parameters.get(attribute) is not gathered.unsharded_params[unit.flats.index(flat)][index]:
            raise ShardError(
                f"rank {flat.collectives.world_rank}: {flat.layout.slots[index].name} was replaced by another "
                "parameter inside engine.gathered(), so its values can't be written back or copied. Copy into it (with "
                "torch.no_grad(): p.copy_(new)), or engine.close() the model, change it, and shard again."
            )
    return found


def _write(gathered: GatheredUnit) -> None:
    unit = gathered.unit
    what = f"the write-back of unit {unit.name!r}"
    with torch.no_grad():
        for number, flat in enumerate(unit.flats):
            _to_shards(gathered, flat, gathered.buffers[number] if gathered.here else None, flat.shard, what)
            unit.outdated = True  # a collective does not increment the shard's version
            if flat.host is not None:
                flat.host.outdate()
            overlaid = any(call.overlay for call in unit.gathered_calls)
            full = full_flat(flat, what) if overlaid else flat.full
            for enclosing in unit.gathered_calls:  # these edits stay, also if an enclosing call undoes its own
                if enclosing.backup:
                    enclosing.backup[number].copy_(full)
            # Calls around copies have memory of their own, which they show and may write in turn.
            if overlaid:
                for call in unit.gathered_calls:
                    for i, param in enumerate(call.unsharded_params[number] if call.here else ()):
                        param.copy_(flat.view(full, i))
            if not gathered.in_place:
                for param in gathered.covered[number] if gathered.covered else flat.unsharded_params:
                    # Backward of a graph that was recorded before must raise, and not use other values.
                    torch.autograd.graph.increment_version(param)
            if gathered.request.grads:
                _write_grads(gathered, number, flat)


def _to_shards(
    gathered: GatheredUnit, flat: FlatBuffer, full: torch.Tensor | None, into: torch.Tensor, what: str
) -> None:
    """Fill `into` with this rank's shard of `full`, which is None on ranks without values. Collective."""
    if gathered.request.ranks is not None:
        scatter_shards(flat, full, into, gathered.request.ranks[0], what)
        return
    assert full is not None
    if full is not into:  # where nothing is gathered, the full buffer is the shard
        into.copy_(flat.own_slot(full))
    unify_replicas(flat, into, what)


def _write_grads(gathered: GatheredUnit, number: int, flat: FlatBuffer) -> None:
    request, unit = gathered.request, gathered.unit
    what = f"the write-back of the gradients of unit {unit.name!r}"
    grads = [own_grad(p) for p in gathered.unsharded_params[number]] if gathered.here else [None] * len(flat.params)
    held = torch.tensor([grad is not None for grad in grads], dtype=torch.uint8, device="cpu")
    if flat.collectives.world > 1:
        flat.collectives.broadcast_message(held, 0 if request.ranks is None else request.ranks[0], what)
    full = None
    if gathered.here:
        full = torch.zeros(flat.layout.numel, dtype=flat.dtypes.grad, device=request.device)
        for i, grad in enumerate(grads):
            if grad is not None:
                flat.view(full, i).copy_(flat.part_of(grad.detach(), i))
    own = torch.empty(flat.layout.shard_numel, dtype=flat.dtypes.grad, device=flat.shard.device)
    _to_shards(gathered, flat, full, own, what)
    for i, param in enumerate(flat.params):
        start, stop = flat.layout.local_range(i, flat.collectives.rank)
        set_grad(param, own[start:stop].clone() if held[i] else None)
