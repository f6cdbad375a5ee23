"""``engine.gathered(...)``: inside, modules hold whole plain parameters; and ``engine.apply`` on top of it.

Two ways. *In place*: all ranks get the values on the mesh's device, so the unit's own gathered buffer and leaves serve,
and a backward inside reduces gradients as ever. *Copies*: some ranks only, or another device; each unit is gathered by
itself and copied where it is wanted.

In both the leaves of the unit are what the modules hold and what ``ShardTensor.__torch_function__`` substitutes for a
reference that the user held before; with copies, the copies take the place of the leaves in ``FlatBuffer.leaves``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from .collectives import Collectives
from .errors import ConfigError, DivergenceError, MissingRankError, ShardError, UnitStateError
from .runtime import Runtime
from .shard_tensor import ShardTensor, slice_full
from .unit import FlatBuffer, Unit
from .whole import agree, local_grads, refill, send_bytes, send_slices, set_grad, unify_replicas, whole_flat, whole_slices


@dataclass(frozen=True)
class _Request:
    """The arguments of one ``gathered``."""

    write: bool
    ranks: tuple[int, ...] | None
    device: torch.device
    grads: bool
    what: str

    def names(self, rank: int) -> bool:
        return self.ranks is None or rank in self.ranks

    def same_place(self, other: _Request) -> bool:
        return self.ranks == other.ranks and self.device == other.device


@dataclass(eq=False)
class Summons:
    """One unit inside one ``gathered``. On ranks that were not named too, so that nesting is decided alike."""

    unit: Unit
    request: _Request
    in_place: bool
    here: bool  # this rank holds the values
    shared: bool = False  # the enclosing gathered() already holds them
    keep: bool = False  # a running backward needs the gathered values afterwards
    overlay: bool = False  # copies on top of an enclosing in-place gathered()
    leaves: list[list[nn.Parameter]] = field(default_factory=list)  # what the modules hold, by flat
    buffers: list[torch.Tensor] = field(default_factory=list)  # their memory
    covered: list[list[nn.Parameter]] = field(default_factory=list)  # flat.leaves from before
    wants: list[list[bool]] = field(default_factory=list)  # requires_grad at the beginning
    hooks: list[Any] = field(default_factory=list)
    backup: list[torch.Tensor] = field(default_factory=list)  # where the leaves are the shard itself


def _open(unit: Unit) -> list[Summons]:
    """The unit's running gathered(), innermost last."""
    stack: list[Summons] = unit.__dict__.setdefault("summons", [])
    return stack


def held_elsewhere(runtime: Runtime) -> Unit | None:
    """A unit whose whole values live in copies (some ranks, another device) right now."""
    for unit in runtime.units:
        if any(not s.in_place for s in _open(unit)):
            return unit
    return None


@contextlib.contextmanager
def gathered(
    runtime: Runtime,
    target: Any = None,
    write: bool = False,
    ranks: int | Iterable[int] | None = None,
    device: torch.device | str | None = None,
    grads: bool = False,
) -> Iterator[None]:
    """Inside, the modules of the units that `target` touches hold whole, plain ``nn.Parameter``. Collective.

    Args:
        runtime: of the engine.
        target: a module, a parameter, or an iterable of them; None for the whole model.
        write: copy the values back at the end. With `ranks`, the lowest named rank's values count for all;
            without sharding rank 0's do. An exception inside writes nothing, on any rank.
        ranks: who gets the values; None for all. The others keep their slices and take part.
        device: where the values are; None for the mesh's device.
        grads: ``.grad`` of the parameters is the whole reduced gradient, written back with `write` (None too).

    Nested calls with the same `ranks` and `device` share the enclosing call's values. A backward inside is reduced
    as usual when the values are in place (all ranks, mesh's device) and `grads` is off; otherwise it is an error.

    Raises:
        ConfigError: an argument is wrong; names it.
        UnitStateError: inside a forward of one of the units, or nested in a call with other `ranks` or `device`.
        ReplacedParameterError: a module holds another parameter than at sharding.
    """
    c = runtime.collectives
    what = "engine.gathered"
    error: Exception | None = None
    units: list[Unit] = []
    request = _Request(write, None, c.device, grads, what)
    try:
        units = units_of(runtime, target)
        request = _Request(bool(write), _ranks(c, ranks), _device(c, device), bool(grads), what)
        _check(runtime, units, request)
    except Exception as problem:  # the other ranks must hear of it
        error = problem
    key = [request.write, request.ranks, request.device.type, request.grads]
    key.append([(u.name, [[g is not None for g in local_grads(f)] for f in u.flats] if grads else 0) for u in units])
    agree(runtime, what, key, error)

    entered: list[Summons] = []
    solo = request.ranks is not None
    failed = True
    try:
        runtime.__dict__["solo"] = runtime.__dict__.get("solo", 0) + solo
        _enter(runtime, units, request, entered)
        try:
            yield
            failed = False
        finally:
            if request.write:
                _finish(runtime, entered, request, failed)
    finally:
        runtime.__dict__["solo"] -= solo
        for summons in reversed(entered):
            _leave(runtime, summons)


# -- arguments ------------------------------------------------------------------------------------------------------------


def units_of(runtime: Runtime, target: Any) -> list[Unit]:
    """The units that hold the parameters of `target`, in the plan's order."""
    if target is None:
        return list(runtime.units)
    found: set[int] = set()
    modules: set[int] = set()
    leaves: dict[int, Unit] = {}
    for unit in runtime.units:
        for flat in unit.flats:
            leaves.update({id(leaf): unit for leaf in flat.leaves})

    def visit(item: Any) -> None:
        if isinstance(item, nn.Module):
            modules.update(id(m) for m in item.modules())
            for p in item.parameters():
                visit(p)
        elif isinstance(item, ShardTensor):
            unit = item._unit_ref() if item._unit_ref is not None else None
            if unit is None or unit.runtime is not runtime:
                raise ConfigError(
                    f"target: {item._spec.name} is a sharded tensor, but not a parameter of this engine's model; "
                    "use full_tensor() for gradients, optimizer state and results."
                )
            found.add(unit.index)
        elif isinstance(item, torch.Tensor):
            if id(item) in leaves:
                found.add(leaves[id(item)].index)  # else it is whole anyway
        elif isinstance(item, Iterable) and not isinstance(item, (str, bytes, dict)):
            for entry in item:
                visit(entry)
        else:
            raise ConfigError(f"target must be a module, a parameter, an iterable of them or None, not {type(item).__name__}.")

    visit(target)
    for unit in runtime.units:
        if any(id(module) in modules for module, *_ in unit.places):
            found.add(unit.index)
    return [u for u in runtime.units if u.index in found]


def _ranks(c: Collectives, ranks: int | Iterable[int] | None) -> tuple[int, ...] | None:
    if ranks is None:
        return None
    chosen = [ranks] if isinstance(ranks, int) else list(ranks)
    for rank in chosen:
        if isinstance(rank, bool) or not isinstance(rank, int) or not 0 <= rank < c.world:
            raise ConfigError(f"ranks: {rank!r} is not one of the ranks 0 to {c.world - 1}.")
    if not chosen:
        raise ConfigError("ranks: no rank is named; leave it out for all ranks.")
    return None if len(set(chosen)) == c.world else tuple(sorted(set(chosen)))


def _device(c: Collectives, device: torch.device | str | None) -> torch.device:
    if device is None:
        return c.device
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device: {error}") from error
    if found.type == "meta":
        raise ConfigError("device: the meta device holds no values.")
    if found.type == c.device.type and found.index is None:
        return c.device
    return found


def _check(runtime: Runtime, units: list[Unit], request: _Request) -> None:
    rank = runtime.collectives.world_rank
    for unit in units:
        stack = _open(unit)
        if stack:
            outer = stack[-1]
            if not outer.in_place and not outer.request.same_place(request):
                raise UnitStateError(
                    f"rank {rank}: unit {unit.name!r} is already gathered on ranks {outer.request.ranks or 'all'} and device "
                    f"{outer.request.device} by an enclosing engine.gathered(); nest only with the same ranks and device."
                )
        elif unit.running:
            raise UnitStateError(
                f"rank {rank}: engine.gathered() of unit {unit.name!r} inside a forward that uses it: there the modules "
                "already hold the whole parameters. Use them directly, or call gathered() before or after the forward."
            )


# -- entering -------------------------------------------------------------------------------------------------------------


def _enter(runtime: Runtime, units: list[Unit], request: _Request, entered: list[Summons]) -> None:
    c = runtime.collectives
    here = request.names(c.world_rank)
    started: list[Summons] = []
    for unit in units:
        stack = _open(unit)
        outer = stack[-1] if stack else None
        plain_place = request.ranks is None and request.device == c.device
        if outer is not None and outer.request.same_place(request):
            summons = Summons(unit, request, outer.in_place, here, shared=True, leaves=outer.leaves, buffers=outer.buffers)
        else:
            in_place = outer is None and plain_place
            summons = Summons(unit, request, in_place, here, overlay=outer is not None)
            if in_place:
                summons.keep = refill(runtime, unit)
        started.append(summons)
    # The in-place gathers are all under way before the first is waited for.
    try:
        for summons in started:
            _enter_one(runtime, summons)
            entered.append(summons)
    except BaseException:
        for summons in started[len(entered) :]:
            if summons.in_place and not summons.shared:
                summons.unit.release()
        raise


def _enter_one(runtime: Runtime, summons: Summons) -> None:
    unit, request = summons.unit, summons.request
    if not summons.shared:
        unit.wait()
        if summons.in_place:
            for flat in unit.flats:
                flat.mirror()
            summons.leaves = [flat.leaves for flat in unit.flats]
            summons.buffers = [flat.full for flat in unit.flats]
            if not unit.sharded:  # edits that are not kept must be undone
                with torch.inference_mode(False):
                    summons.backup = [flat.shard.clone() for flat in unit.flats]
        else:
            _copy(summons)
    whole_grads: list[list[torch.Tensor | None]] = []
    if request.grads:
        for flat in unit.flats:
            whole_grads.append(whole_slices(flat, local_grads(flat), f"the gradients of unit {unit.name!r}"))
    if summons.here and not summons.shared:
        _install(summons)
    _open(unit).append(summons)
    if summons.here:
        summons.wants = [[leaf.requires_grad for leaf in leaves] for leaves in summons.leaves]
        if request.grads or not summons.in_place:
            _refuse_backward(summons)
        for leaves, values in zip(summons.leaves, whole_grads, strict=False):
            for leaf, value in zip(leaves, values, strict=True):
                leaf.grad = None if value is None else value.to(leaf.device)


def _copy(summons: Summons) -> None:
    unit, device = summons.unit, summons.request.device
    for flat in unit.flats:
        if summons.overlay:
            full = flat.full  # with the edits of the enclosing gathered()
        else:
            full = whole_flat(flat, f"the all-gather of unit {unit.name!r}")
        if not summons.here:
            continue
        with torch.inference_mode(False), torch.no_grad():
            if full is flat.full or full is flat.shard or full.device != device:
                full = full.to(device, copy=True)
            leaves = [
                nn.Parameter(flat.view(full, i).data, requires_grad=flat.leaves[i].requires_grad)
                for i in range(len(flat.params))
            ]
        with torch._C.DisableTorchFunctionSubclass():
            for p, leaf in zip(flat.params, leaves, strict=True):
                leaf.requires_grad_(p.requires_grad)
        summons.leaves.append(leaves)
        summons.buffers.append(full)


def _install(summons: Summons) -> None:
    unit = summons.unit
    was = unit.is_summoned
    unit.is_summoned = True  # first: uninstall() must not take edits for edits of a forward
    if summons.overlay:
        unit.uninstall()
    summons.covered = [flat.leaves for flat in unit.flats]
    _set_leaves(unit, summons.leaves)
    try:
        unit.install()
    except ShardError:
        _set_leaves(unit, summons.covered)
        if summons.overlay:
            unit.install()
        unit.is_summoned = was
        raise
    if not summons.overlay:
        unit.running += 1  # nothing may release it, and nothing copies it


def _set_leaves(unit: Unit, leaves: list[list[nn.Parameter]]) -> None:
    for flat, chosen in zip(unit.flats, leaves, strict=True):
        flat.leaves = chosen


def _refuse_backward(summons: Summons) -> None:
    unit = summons.unit
    for flat, leaves in zip(unit.flats, summons.leaves, strict=True):
        for slot, leaf in zip(flat.layout.slots, leaves, strict=True):
            if leaf.requires_grad:
                summons.hooks.append(leaf.register_hook(_Refusal(slot.name, unit.collectives.world_rank)))


class _Refusal:
    def __init__(self, name: str, rank: int) -> None:
        self.name, self.rank = name, rank

    def __call__(self, grad: torch.Tensor) -> None:
        raise UnitStateError(
            f"rank {self.rank}: a backward reached {self.name} inside engine.gathered() with ranks=, device= or grads=, where "
            "its gradient can't be reduced. Run the backward outside, or gather without these arguments."
        )


# -- writing back ---------------------------------------------------------------------------------------------------------


def _finish(runtime: Runtime, entered: list[Summons], request: _Request, failed: bool) -> None:
    """Write back, on every rank or on none."""
    import sys

    problem: Exception | None = None
    running = sys.exc_info()[1]
    if failed:
        if not isinstance(running, Exception) or isinstance(running, (MissingRankError, DivergenceError)):
            return  # the ranks are apart already, or this one is being stopped
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
    """Bring values that were assigned (``weight.data = merged``) into the buffer; refuse what does not fit."""
    for flat, leaves, buffer in zip(summons.unit.flats, summons.leaves, summons.buffers, strict=True):
        for i, leaf in enumerate(leaves):
            view = flat.view(buffer, i)
            if _is(leaf, view):
                continue
            if leaf.shape != view.shape or leaf.dtype != view.dtype:
                raise ShardError(
                    f"rank {flat.collectives.world_rank}: {flat.layout.slots[i].name} became {leaf.dtype} of shape "
                    f"{tuple(leaf.shape)} inside engine.gathered(write=True); {view.dtype} of shape {tuple(view.shape)} can't "
                    "hold it. engine.close() the model, change it, and shard again."
                )
            with torch.no_grad():
                view.copy_(leaf.detach())
    for module, attribute, flat, index in summons.unit.places:
        held = module._parameters.get(attribute)
        leaf = summons.leaves[summons.unit.flats.index(flat)][index]
        if held is not leaf:
            raise ShardError(
                f"rank {flat.collectives.world_rank}: {flat.layout.slots[index].name} was replaced by another parameter inside "
                "engine.gathered(write=True), so its values can't be written back. Copy into it "
                "(with torch.no_grad(): p.copy_(new)), or engine.close() the model, change it, and shard again."
            )


def _is(leaf: torch.Tensor, view: torch.Tensor) -> bool:
    return (
        leaf.data_ptr() == view.data_ptr()
        and leaf.shape == view.shape
        and leaf.stride() == view.stride()
        and leaf.dtype == view.dtype
    )


def _write(summons: Summons) -> None:
    unit, request = summons.unit, summons.request
    what = f"the write-back of unit {unit.name!r}"
    with torch.no_grad():
        for number, flat in enumerate(unit.flats):
            if request.ranks is not None:
                send_slices(flat, summons.buffers[number] if summons.here else None, flat.shard, request.ranks[0], what)
            else:
                if not (summons.in_place and not flat.sharded):  # else it is the very memory
                    flat.shard.copy_(flat.own_slot(summons.buffers[number]))
                unify_replicas(flat, what)
            if summons.overlay and flat.sharded:
                flat.full.copy_(whole_flat(flat, what))
            for enclosing in _open(unit):  # these edits stay, whatever becomes of theirs
                if enclosing.backup:
                    enclosing.backup[number].copy_(flat.shard)
            if not summons.in_place:
                for leaf in summons.covered[number] if summons.covered else flat.leaves:
                    # A graph recorded before must not go on with other values in silence.
                    torch.autograd.graph.increment_version(leaf)
            if request.grads:
                _write_grads(summons, number, flat)


def _write_grads(summons: Summons, number: int, flat: FlatBuffer) -> None:
    request, unit = summons.request, summons.unit
    what = f"the write-back of the gradients of unit {unit.name!r}"
    grads = [leaf.grad for leaf in summons.leaves[number]] if summons.here else [None] * len(flat.params)
    if request.ranks is None:
        for param, grad in zip(flat.params, grads, strict=True):
            local = None
            if grad is not None:
                local = slice_full(grad.detach(), param._spec).to(flat.shard.device)
            set_grad(param, None if local is None else local.clone())
        return
    source = request.ranks[0]
    held = torch.tensor([0 if g is None else 1 for g in grads], dtype=torch.uint8)
    held = send_bytes(unit.runtime, held, source, what)
    if not held.any():
        for param in flat.params:
            set_grad(param, None)
        return
    full = None
    if summons.here:
        full = torch.zeros(flat.layout.numel, dtype=flat.dtype, device=request.device)
        for i, grad in enumerate(grads):
            if grad is not None:
                flat.view(full, i).copy_(grad)
    own = torch.empty(flat.layout.shard_numel, dtype=flat.dtype, device=flat.shard.device)
    send_slices(flat, full, own, source, what)
    for i, param in enumerate(flat.params):
        start, stop = flat.layout.local_range(i, flat.collectives.rank)
        set_grad(param, own[start:stop].clone() if held[i] else None)


# -- leaving --------------------------------------------------------------------------------------------------------------


def _leave(runtime: Runtime, summons: Summons) -> None:
    unit = summons.unit
    _open(unit).remove(summons)
    for hook in summons.hooks:
        hook.remove()
    if summons.here:
        with torch._C.DisableTorchFunctionSubclass():
            for flat, leaves, wanted in zip(unit.flats, summons.leaves, summons.wants, strict=False):
                for p, leaf, before in zip(flat.params, leaves, wanted, strict=True):
                    if summons.request.grads or not summons.shared:
                        leaf.grad = None
                    if leaf.requires_grad != before:  # frozen or unfrozen inside
                        p.requires_grad_(leaf.requires_grad)
    if summons.shared:
        return
    if summons.here:
        for flat, leaves, buffer in zip(unit.flats, summons.leaves, summons.buffers, strict=True):
            for i, leaf in enumerate(leaves):
                view = flat.view(buffer, i)
                if not _is(leaf, view):
                    leaf.data = view.data
        for flat, values in zip(unit.flats, summons.backup, strict=False):
            with torch.no_grad():
                flat.shard.copy_(values)
        unit.uninstall()
        _set_leaves(unit, summons.covered)
        if summons.overlay:
            unit.install()
        else:
            unit.running -= 1
            unit.is_summoned = False
        for flat in unit.flats:
            flat.mirror()
    if summons.in_place and unit.sharded:
        unit.release()
        if summons.keep:  # backward goes on with the values as they are now
            unit.gather()
            unit.wait()
            runtime.idle[unit.index] = unit


# -- engine.apply ---------------------------------------------------------------------------------------------------------


def apply(model: nn.Module, runtime: Runtime, fn: Callable[[nn.Module], Any]) -> None:
    """``model.apply(fn)`` with whole parameters, children first; what `fn` changes is kept. Collective.

    Each call sees the units of the module's own parameters whole, and those of its children too where all of them lie
    in one unit. Of a larger module's children `fn` sees the sharded parameters, on which element-wise edits work.
    """
    whole: dict[int, list[Unit]] = {}
    for module in model.modules():
        own = units_of(runtime, [p for p in module._parameters.values() if p is not None])
        below = units_of(runtime, module)
        whole[id(module)] = below if len(below) <= 1 else own
    order: list[nn.Module] = []

    def visit(module: nn.Module) -> None:
        for child in module.children():
            visit(child)
        order.append(module)

    visit(model)
    at = 0
    while at < len(order):  # neighbours with the same units are gathered once
        units = whole[id(order[at])]
        stop = at + 1
        while stop < len(order) and whole[id(order[stop])] == units:
            stop += 1
        # An empty list of units means nothing to gather, but still a place where all ranks meet.
        with gathered(runtime, [u.params for u in units], write=True):
            for module in order[at:stop]:
                fn(module)
        at = stop
