"""``engine.gathered(...)``, inside which modules hold full plain parameters, and ``engine.apply`` on top of it.

There are two ways. *In place*, where all ranks get the values on the mesh's device: the modules hold the unit's own unsharded
parameters, and a backward inside reduces gradients as usual. With *copies*, where only some ranks get the values, or the values
are on another device, or modules compute with other values than the stored ones: each unit is gathered into new memory, or copied
from an enclosing call whose values all ranks have.

In both ways ``FlatBuffer.unsharded_params`` has the parameters that the modules hold, and that ``ShardTensor.__torch_function__``
substitutes for a sharded parameter: the unit's own, or the copies.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ..comm.collectives import Collectives
from ..comm.consensus import agree, met
from ..errors import ConfigError, ShardError, UnitStateError
from ..runtime.runtime import Runtime
from ..schedule.unit_state import State
from ..shard_tensor.tensor import ShardTensor
from ..shard_tensor.unsharded_param import is_view, set_own_grad, show_as_plain
from ..unit.full_values import full_flat, full_tensors_from
from ..unit.unit import Unit, unit_of
from .scattered_values import local_grads
from .write_back import GatheredUnit, Request, settle, write_back


@contextlib.contextmanager
def gathered(
    runtime: Runtime,
    target: Any = None,
    write: bool = False,
    ranks: int | Iterable[int] | None = None,
    device: torch.device | str | None = None,
    grads: bool = False,
) -> Iterator[None]:
    """Let the modules of the units that `target` touches hold full, plain ``nn.Parameter`` inside. Collective.

    Arguments and errors are those of :meth:`.Engine.gathered`.
    """
    c = runtime.collectives
    what = "engine.gathered"
    error: Exception | None = None
    units: list[Unit] = []
    held: list[Any] = []  # the units' names, and which gradients there are
    request = Request(write, None, c.device, grads)
    try:
        units = units_of(runtime, target)
        request = Request(bool(write), _ranks(c, ranks), _device(c, device), bool(grads))
        _check(runtime, units, request)
        if request.grads:
            runtime.await_votes()
        held = [(u.name, [[g is not None for g in local_grads(f)] for f in u.flats if grads]) for u in units]
    except Exception as problem:  # the other ranks must hear of it
        error = problem
    key = [(request.write, request.ranks, request.device.type, request.grads), held]
    with runtime.lone.until_end():
        if request.write or request.grads:
            agree(runtime, what, key, error)
        else:
            met(runtime, what, key, error)
        with runtime.lone.held():
            yield from _within(runtime, units, request)


def _within(runtime: Runtime, units: list[Unit], request: Request) -> Iterator[None]:
    entered: list[GatheredUnit] = []
    solo = request.ranks is not None
    failed = True
    try:
        runtime.solo += solo
        _enter(runtime, units, request, entered)
        try:
            yield
            failed = False
        finally:
            if request.write:
                write_back(runtime, entered, failed)
    finally:
        runtime.solo -= solo
        for entry in reversed(entered):
            _leave(entry)


# -- arguments --------------------------------------------------------------------------------------------------------


def units_of(runtime: Runtime, target: Any) -> list[Unit]:
    """Return the units that hold the parameters of `target`, in the plan's order."""
    if target is None:
        return list(runtime.units)
    found: set[int] = set()
    unsharded = {id(p): unit.index for unit in runtime.units for flat in unit.flats for p in flat.unsharded_params}

    def visit(item: Any) -> None:
        if isinstance(item, nn.Module):
            visit(item.parameters())
        elif isinstance(item, ShardTensor):
            unit = unit_of(item)
            if unit is None or unit.runtime is not runtime:
                raise ConfigError(
                    f"target: {item._spec.name} is a sharded tensor, but not a parameter of this engine's model; "
                    "use full_tensor() for gradients, optimizer state and results."
                )
            found.add(unit.index)
        elif isinstance(item, torch.Tensor):
            if id(item) in unsharded:
                found.add(unsharded[id(item)])  # any other plain tensor is full anyway
        elif isinstance(item, Iterable) and not isinstance(item, (str, bytes, dict)):
            for entry in item:
                visit(entry)
        else:
            raise ConfigError(
                f"target must be a module, a parameter, an iterable of them or None, not {type(item).__name__}."
            )

    visit(target)
    return [unit for unit in runtime.units if unit.index in found]


def _ranks(c: Collectives, ranks: int | Iterable[int] | None) -> tuple[int, ...] | None:
    if ranks is None:
        return None
    chosen = set(ranks) if isinstance(ranks, Iterable) else {ranks}
    if not chosen or not chosen <= set(range(c.world)) or any(isinstance(rank, bool) for rank in chosen):
        raise ConfigError(f"ranks: {ranks!r} must name one or several of the ranks 0 to {c.world - 1}.")
    return None if len(chosen) == c.world else tuple(sorted(chosen))


def _device(c: Collectives, device: torch.device | str | None) -> torch.device:
    if device is None:
        return c.device
    try:
        found = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ConfigError(f"device: {error}") from error
    if found.type == "meta":
        raise ConfigError("device: the meta device holds no values.")
    return c.device if found.type == c.device.type and found.index is None else found


def _check(runtime: Runtime, units: list[Unit], request: Request) -> None:
    rank = runtime.collectives.world_rank
    outers: list[GatheredUnit] = []
    for unit in units:
        name = unit.distributed
        if name is not None and (request.ranks is not None or request.device != runtime.collectives.device):
            raise ConfigError(
                f"{'ranks' if request.ranks is not None else 'device'}: unit {unit.name!r} has {name}, a DTensor, with which all "
                "ranks of its mesh must compute together, on its device; leave ranks= and device= out."
            )
        unit.runtime.leave_interrupted()
        if unit.gathered_calls:
            outer = unit.gathered_calls[-1]
            if outer.request.same_place(request):
                continue
            if outer.request.ranks is not None:
                raise UnitStateError(
                    f"rank {rank}: unit {unit.name!r} is already gathered on ranks {outer.request.ranks} and device "
                    f"{outer.request.device} by an enclosing engine.gathered(); nest only with the same ranks and device."
                )
            outers.append(outer)
        elif unit.running:
            raise UnitStateError(
                f"rank {rank}: engine.gathered() of unit {unit.name!r} inside a forward that uses it: there the "
                "modules already hold the full parameters. Use them directly, or call gathered() before or after the "
                "forward."
            )
        else:
            unit.refuse_replaced()
    settle(outers)


# -- entering ---------------------------------------------------------------------------------------------------------


def _enter(runtime: Runtime, units: list[Unit], request: Request, entered: list[GatheredUnit]) -> None:
    c = runtime.collectives
    here = request.ranks is None or c.world_rank in request.ranks
    started: list[GatheredUnit] = []
    try:
        # All in-place unshards are started before the first is waited for.
        for unit in units:
            outer = unit.gathered_calls[-1] if unit.gathered_calls else None
            if outer is None:
                # In place is possible only if modules compute with the stored values.
                in_place = request.ranks is None and request.device == c.device and unit.exact
                entry = GatheredUnit(unit, request, in_place, here)
            elif outer.request.same_place(request):
                entry = GatheredUnit(unit, request, outer.in_place, here, shared=True)
                entry.unsharded_params, entry.buffers = outer.unsharded_params, outer.buffers
            else:
                entry = GatheredUnit(unit, request, in_place=False, here=here, overlay=True)
            started.append(entry)
            if entry.in_place and not entry.shared:
                _start(runtime, entry)
        for entry in started:
            _enter_unit(entry)
            entered.append(entry)
    except BaseException:
        for entry in started[len(entered) :]:
            if entry.in_place and not entry.shared:
                with contextlib.suppress(ShardError):  # the error that is on its way says more
                    _release(entry)
        raise


def _start(runtime: Runtime, entry: GatheredUnit) -> None:
    """Start an unshard in place with the present values. Collective, unless this rank reads alone."""
    unit = entry.unit
    if runtime.lone.running:
        # The other ranks don't know of this read. Afterwards the unit must be in the state that they expect.
        runtime.lone.reshard_outdated(unit)
        if unit.state is State.SHARDED:
            unit.unshard_alone()
        else:
            entry.keep, entry.refill, unit.refill = True, unit.refill, False
        return
    if unit.state is not State.SHARDED:
        # Ranks may keep different units, so no collective may depend on it. Other ranks may reshard this one, and unshard it
        # anew; then this rank takes part.
        entry.keep = entry.refill = bool(unit.uses or unit.kept)
        # The unit may have been unsharded before an edit of the shards, or be prefetched on some ranks only.
        unit.wait()
        unit.reshard()
    unit.unshard()
    if not entry.keep:
        runtime.schedule.gathered.pop(unit.index, None)


def _release(entry: GatheredUnit) -> None:
    """Reshard a unit that was unsharded in place, unless it stays unsharded on this rank. Not collective."""
    unit = entry.unit
    if entry.keep:
        unit.wait()
        unit.refill = entry.refill
    else:
        unit.reshard()


def _enter_unit(entry: GatheredUnit) -> None:
    unit, request = entry.unit, entry.request
    if not entry.shared:
        unit.wait()
        if entry.in_place:
            for flat in unit.flats:
                flat.mirror()
            entry.unsharded_params = [flat.unsharded_params for flat in unit.flats]
            entry.buffers = [flat.full for flat in unit.flats]
            # Where the parameters are views of the shards, or stay unsharded, edits that are not written back must be undone.
            if entry.keep or not unit.gathers:
                with torch.inference_mode(False):
                    entry.backup = [full.clone() for full in entry.buffers]
        else:
            _copy(entry)
    full_grads: list[list[torch.Tensor | None]] = []
    if request.grads:
        for flat in unit.flats:
            found = full_tensors_from(flat, local_grads(flat), f"the gradients of unit {unit.name!r}")
            full_grads.append([None if g is None else flat.as_given(g, i) for i, g in enumerate(found)])
    if entry.here and not entry.shared:
        _install(entry)
    unit.gathered_calls.append(entry)
    if entry.here:
        entry.wants = [[param.requires_grad for param in params] for params in entry.unsharded_params]
        if request.grads or not entry.in_place:
            _refuse_backward(entry)
        for params, values in zip(entry.unsharded_params, full_grads, strict=False):
            for param, value in zip(params, values, strict=True):
                if value is not None and value.dtype != param.dtype:
                    param.grad_dtype = value.dtype
                set_own_grad(param, None if value is None else value.to(param.device))


def _copy(entry: GatheredUnit) -> None:
    unit, device = entry.unit, entry.request.device
    for number, flat in enumerate(unit.flats):
        likes: Sequence[torch.Tensor] = flat.params
        if entry.overlay:  # with the edits of the enclosing call
            full, likes = unit.gathered_calls[-1].buffers[number], flat.unsharded_params
        else:
            full = full_flat(flat, unit.gather_text)
        if not entry.here:
            continue
        with torch.inference_mode(False), torch.no_grad():
            if entry.overlay or full is flat.shard or full.device != device:
                full = full.to(device, copy=True)
            params = [flat.parameter_over(flat.view(full, i), i) for i in range(len(flat.params))]
        with torch._C.DisableTorchFunctionSubclass():
            for like, param in zip(likes, params, strict=True):
                param.requires_grad_(like.requires_grad)
        entry.unsharded_params.append(params)
        entry.buffers.append(full)


def _install(entry: GatheredUnit) -> None:
    unit = entry.unit
    entry.covered = [flat.unsharded_params for flat in unit.flats]
    if entry.overlay:
        unit.exchange(entry.unsharded_params)
        return
    for flat in unit.flats:
        flat.mirror()  # while flat.unsharded_params are the unit's own: copies must not get their hooks
    unit.summon()  # first, because uninstall() must not take edits for those of a forward
    unit.exchange(entry.unsharded_params)
    for flat in unit.flats:
        show_as_plain(flat.unsharded_params, True)
    unit.install()
    unit.running += 1  # so that the unit is neither resharded nor copied


def _uninstall(entry: GatheredUnit) -> None:
    unit = entry.unit
    if entry.overlay:
        unit.exchange(entry.covered)
        return
    for full, values in zip(entry.buffers, entry.backup, strict=False):
        with torch.no_grad():
            full.copy_(values)
    unit.uninstall()
    unit.exchange(entry.covered)
    for flat in unit.flats:
        show_as_plain(flat.unsharded_params, False)
    unit.dismiss()
    unit.running -= 1
    for flat in unit.flats:
        if entry.in_place:
            for i, param in enumerate(flat.unsharded_params):
                if not is_view(param, flat.view(flat.full, i)):  # the user has given it other memory
                    flat.put_back(i)
        flat.mirror()


def _refuse_backward(entry: GatheredUnit) -> None:
    """Make a backward that reaches one of the parameters raise, because this gradient can't be reduced."""
    rank = entry.unit.collectives.world_rank

    def refuse(name: str, grad: torch.Tensor) -> None:
        raise UnitStateError(
            f"rank {rank}: a backward reached {name} as engine.gathered() gave it, and such a gradient can't be reduced: ranks=, "
            "device= or grads= was passed, or ShardConfig.precision or ShardConfig.quantized changes the values of this unit. "
            "Run forward and backward outside gathered(); or, if you passed these arguments, leave them out."
        )

    for flat, params in zip(entry.unit.flats, entry.unsharded_params, strict=True):
        for slot, param in zip(flat.layout.slots, params, strict=True):
            if param.requires_grad:
                entry.hooks.append(param.register_hook(functools.partial(refuse, slot.name)))


# -- leaving ----------------------------------------------------------------------------------------------------------


def _leave(entry: GatheredUnit) -> None:
    unit = entry.unit
    unit.gathered_calls.remove(entry)
    if entry.in_place:  # copies keep the hooks: a graph over copies is refused outside as well
        for hook in entry.hooks:
            hook.remove()
    if entry.here:
        with torch._C.DisableTorchFunctionSubclass():
            for flat, params, wanted in zip(unit.flats, entry.unsharded_params, entry.wants, strict=False):
                for sharded, param, before in zip(flat.params, params, wanted, strict=True):
                    if entry.request.grads or not entry.shared:
                        set_own_grad(param, None)
                    if param.requires_grad != before:  # frozen or unfrozen inside
                        sharded.requires_grad_(param.requires_grad)
    if entry.shared:
        return
    if entry.here:
        _uninstall(entry)
    if entry.in_place and unit.gathers:
        _release(entry)


# -- engine.apply -----------------------------------------------------------------------------------------------------


def apply(model: nn.Module, runtime: Runtime, fn: Callable[[nn.Module], Any]) -> None:
    """Carry out ``model.apply(fn)`` with full parameters, children first, and keep the changes of `fn`. Collective.

    In each call the module's own parameters are full, and those of its children, too, if all of them are in one unit.
    Otherwise `fn` sees the children's parameters sharded, on which elementwise edits work.
    """

    def full_in(module: nn.Module) -> list[Unit]:
        below = units_of(runtime, module)
        return below if len(below) <= 1 else units_of(runtime, module.parameters(recurse=False))

    def children_first(module: nn.Module) -> Iterator[nn.Module]:
        for child in module.children():
            yield from children_first(child)
        yield module

    # Consecutive modules with the same units share one gathered(); one without units, so that all ranks compare what they do.
    modules = [(full_in(module), module) for module in children_first(model)]
    for units, together in itertools.groupby(modules, lambda pair: pair[0]):
        with gathered(runtime, [unit.params for unit in units], write=True):
            for _, module in together:
                fn(module)
