"""``engine.gathered(...)``, inside which modules hold full plain parameters, and ``engine.apply`` on top of it.

There are two ways. *In place*: all ranks get the values on the mesh's device. The unit's own full buffer and leaves serve,
and a backward inside reduces gradients as usual. *Copies*: only some ranks get the values, or on another device. Each unit
is unsharded by itself, and copied where it is wanted.

In both ways ``FlatBuffer.unsharded_params`` has the parameters that the modules hold, and that ``ShardTensor.__torch_function__``
substitutes for a sharded parameter: the unit's own, or the copies.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import nn

from ..comm.collectives import Collectives
from ..comm.consensus import agree
from ..errors import ConfigError, ShardError, UnitStateError
from ..runtime.runtime import Runtime
from ..shard_tensor.tensor import ShardTensor
from ..shard_tensor.unsharded_param import is_view, move, set_own_grad, show_as_plain
from ..unit.flat_buffer import FlatBuffer
from ..unit.full_values import full_flat, full_tensors_from
from ..unit.unit import Unit, unit_of
from .full_values import local_grads, refill
from .write_back import Request, Summons, open_on, write_back


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

    Nested calls with the same `ranks` and `device` share the enclosing call's values. A backward inside is reduced as usual
    if the values are in place (all ranks, the mesh's device, the stored dtype) and `grads` is off; otherwise it is an error.

    Args:
        runtime: of the engine.
        target: a module, a parameter, or an iterable of them; None for the whole model.
        write: copy the values back at the end. With `ranks`, the lowest named rank's values count for all;
            without sharding rank 0's do. After an exception inside nothing is written, on any rank.
        ranks: the ranks that get the values; None for all. The other ranks keep their shards and take part.
        device: where the values are; None for the mesh's device.
        grads: ``.grad`` of the parameters is the full reduced gradient; with `write` it is written back, None too.

    Raises:
        ConfigError: an argument is wrong; names it.
        UnitStateError: inside a forward of one of the units, or nested in a call with other `ranks` or `device`.
        ReplacedParameterError: a module holds another parameter than at sharding.
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
        held = [(u.name, [[g is not None for g in local_grads(f)] for f in u.flats if grads]) for u in units]
    except Exception as problem:  # the other ranks must hear of it
        error = problem
    agree(runtime, what, [(request.write, request.ranks, request.device.type, request.grads), held], error)

    entered: list[Summons] = []
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
        for summons in reversed(entered):
            _leave(runtime, summons)


# -- arguments --------------------------------------------------------------------------------------------------------


def units_of(runtime: Runtime, target: Any) -> list[Unit]:
    """Return the units that hold the parameters of `target`, in the plan's order."""
    if target is None:
        return list(runtime.units)
    found: set[int] = set()
    modules: set[int] = set()
    leaves: dict[int, Unit] = {}
    for unit in runtime.units:
        for flat in unit.flats:
            leaves.update({id(leaf): unit for leaf in flat.unsharded_params})

    def visit(item: Any) -> None:
        if isinstance(item, nn.Module):
            modules.update(id(m) for m in item.modules())
            for p in item.parameters():
                visit(p)
        elif isinstance(item, ShardTensor):
            unit = unit_of(item)
            if unit is None or unit.runtime is not runtime:
                raise ConfigError(
                    f"target: {item._spec.name} is a sharded tensor, but not a parameter of this engine's model; "
                    "use full_tensor() for gradients, optimizer state and results."
                )
            found.add(unit.index)
        elif isinstance(item, torch.Tensor):
            if id(item) in leaves:
                found.add(leaves[id(item)].index)  # any other plain tensor is full anyway
        elif isinstance(item, Iterable) and not isinstance(item, (str, bytes, dict)):
            for entry in item:
                visit(entry)
        else:
            raise ConfigError(
                f"target must be a module, a parameter, an iterable of them or None, not {type(item).__name__}."
            )

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


def _check(runtime: Runtime, units: list[Unit], request: Request) -> None:
    rank = runtime.collectives.world_rank
    for unit in units:
        name = unit.distributed
        if name is not None and (request.ranks is not None or request.device != runtime.collectives.device):
            raise ConfigError(
                f"{'ranks' if request.ranks is not None else 'device'}: unit {unit.name!r} has {name}, a DTensor, with which all "
                "ranks of its mesh must compute together, on its device; leave ranks= and device= out."
            )
        unit.leave_interrupted()
        stack = open_on(unit)
        if stack:
            outer = stack[-1]
            if not outer.in_place and not outer.request.same_place(request):
                raise UnitStateError(
                    f"rank {rank}: unit {unit.name!r} is already gathered on ranks {outer.request.ranks or 'all'} and "
                    f"device {outer.request.device} by an enclosing engine.gathered(); nest only with the same ranks "
                    "and device (or within a call for all ranks, on their device, of what is computed with as it is stored)."
                )
        elif unit.running:
            raise UnitStateError(
                f"rank {rank}: engine.gathered() of unit {unit.name!r} inside a forward that uses it: there the "
                "modules already hold the whole parameters. Use them directly, or call gathered() before or after the "
                "forward."
            )


# -- entering ---------------------------------------------------------------------------------------------------------


def _enter(runtime: Runtime, units: list[Unit], request: Request, entered: list[Summons]) -> None:
    c = runtime.collectives
    here = request.names(c.world_rank)
    started: list[Summons] = []
    for unit in units:
        stack = open_on(unit)
        outer = stack[-1] if stack else None
        plain_place = request.ranks is None and request.device == c.device
        if outer is not None and outer.request.same_place(request):
            summons = Summons(unit, request, outer.in_place, here, shared=True)
            summons.unsharded_params, summons.buffers = outer.unsharded_params, outer.buffers
        else:
            # In place is possible only if modules compute with the stored values.
            in_place = outer is None and plain_place and unit.exact
            summons = Summons(unit, request, in_place, here, overlay=outer is not None)
            if in_place:
                summons.keep = refill(runtime, unit)
        started.append(summons)
    # All in-place unshards are started before the first is waited for.
    try:
        for summons in started:
            _enter_one(summons)
            entered.append(summons)
    except BaseException:
        for summons in started[len(entered) :]:
            if summons.in_place and not summons.shared:
                summons.unit.reshard()
        raise


def _enter_one(summons: Summons) -> None:
    unit, request = summons.unit, summons.request
    if not summons.shared:
        unit.wait()
        if summons.in_place:
            for flat in unit.flats:
                flat.mirror()
            summons.unsharded_params = [flat.unsharded_params for flat in unit.flats]
            summons.buffers = [flat.full for flat in unit.flats]
            if not unit.gathers:  # the leaves view the shards: edits must be undone if they are not written back
                with torch.inference_mode(False):
                    summons.backup = [flat.shard.clone() for flat in unit.flats]
        else:
            _copy(summons)
    full_grads: list[list[torch.Tensor | None]] = []
    if request.grads:
        for flat in unit.flats:
            found = full_tensors_from(flat, local_grads(flat), f"the gradients of unit {unit.name!r}")
            full_grads.append([None if g is None else flat.as_given(g, i) for i, g in enumerate(found)])
    if summons.here and not summons.shared:
        _install(summons)
    open_on(unit).append(summons)
    if summons.here:
        summons.wants = [[leaf.requires_grad for leaf in leaves] for leaves in summons.unsharded_params]
        if request.grads or not summons.in_place:
            _refuse_backward(summons)
        for leaves, values in zip(summons.unsharded_params, full_grads, strict=False):
            for leaf, value in zip(leaves, values, strict=True):
                if value is not None and value.dtype != leaf.dtype:
                    leaf.grad_dtype = value.dtype
                set_own_grad(leaf, None if value is None else value.to(leaf.device))


def _copy(summons: Summons) -> None:
    unit, device = summons.unit, summons.request.device
    for flat in unit.flats:
        if summons.overlay:
            full = flat.full  # with the edits of the enclosing gathered()
        else:
            full = full_flat(flat, f"the all-gather of unit {unit.name!r}")
        if not summons.here:
            continue
        with torch.inference_mode(False), torch.no_grad():
            if full is flat.full or full is flat.shard or full.device != device:
                full = full.to(device, copy=True)
            leaves = [flat.parameter_over(full, i) for i in range(len(flat.params))]
        with torch._C.DisableTorchFunctionSubclass():
            for p, leaf in zip(flat.params, leaves, strict=True):
                leaf.requires_grad_(p.requires_grad)
        summons.unsharded_params.append(leaves)
        summons.buffers.append(full)


def _install(summons: Summons) -> None:
    unit = summons.unit
    if not summons.overlay:
        unit.summon()  # first, because uninstall() must not take edits for those of a forward
    if summons.overlay:
        unit.uninstall()
    for flat in unit.flats:
        flat.mirror()  # while flat.unsharded_params are the unit's own: copies must not get their hooks
    summons.covered = [flat.unsharded_params for flat in unit.flats]
    _set_leaves(unit, summons.unsharded_params)
    for flat in unit.flats:
        show_as_plain(flat.unsharded_params, True)
    try:
        unit.install()
    except ShardError:
        _set_leaves(unit, summons.covered)
        if summons.overlay:
            unit.install()
        else:
            for flat in unit.flats:
                show_as_plain(flat.unsharded_params, False)
            unit.dismiss()
        raise
    if not summons.overlay:
        unit.running += 1  # so that the unit is neither resharded nor copied


def _set_leaves(unit: Unit, leaves: list[list[nn.Parameter]]) -> None:
    for flat, chosen in zip(unit.flats, leaves, strict=True):
        flat.unsharded_params = chosen


def _refuse_backward(summons: Summons) -> None:
    unit = summons.unit
    for flat, leaves in zip(unit.flats, summons.unsharded_params, strict=True):
        for slot, leaf in zip(flat.layout.slots, leaves, strict=True):
            if leaf.requires_grad:
                summons.hooks.append(leaf.register_hook(_Refusal(slot.name, unit.collectives.world_rank)))


class _Refusal:
    """A gradient hook that raises, because this gradient can't be reduced."""

    def __init__(self, name: str, rank: int) -> None:
        self.name, self.rank = name, rank

    def __call__(self, grad: torch.Tensor) -> None:
        raise UnitStateError(
            f"rank {self.rank}: a backward reached {self.name} as engine.gathered() gave it with ranks=, device= or grads=, or "
            "because it is computed with in another dtype (ShardConfig.precision) or as other ranks decode it "
            "(ShardConfig.quantized): such a gradient can't be reduced. Run forward and backward outside, or gather without "
            "these."
        )


# -- leaving ----------------------------------------------------------------------------------------------------------


def _leave(runtime: Runtime, summons: Summons) -> None:
    unit = summons.unit
    open_on(unit).remove(summons)
    if summons.in_place:  # copies keep the hooks: a graph over copies is refused outside as well
        for hook in summons.hooks:
            hook.remove()
    if summons.here:
        with torch._C.DisableTorchFunctionSubclass():
            for flat, leaves, wanted in zip(unit.flats, summons.unsharded_params, summons.wants, strict=False):
                for p, leaf, before in zip(flat.params, leaves, wanted, strict=True):
                    if summons.request.grads or not summons.shared:
                        set_own_grad(leaf, None)
                    if leaf.requires_grad != before:  # frozen or unfrozen inside
                        p.requires_grad_(leaf.requires_grad)
    if summons.shared:
        return
    if summons.here:
        moved: list[tuple[FlatBuffer, int]] = []  # the unit's own leaves to which the user gave other memory
        for flat, leaves, buffer in zip(unit.flats, summons.unsharded_params, summons.buffers, strict=True):
            for i, leaf in enumerate(leaves):
                view = flat.view(buffer, i)
                if not is_view(leaf, view):
                    move(leaf, view.data)
                    if summons.in_place:
                        moved.append((flat, i))
        for flat, values in zip(unit.flats, summons.backup, strict=False):
            with torch.no_grad():
                flat.shard.copy_(values)
        unit.uninstall()
        _set_leaves(unit, summons.covered)
        for flat, i in moved:
            flat.put_back(i)
        if summons.overlay:
            unit.install()
        else:
            unit.running -= 1
            unit.dismiss()
            for flat in unit.flats:
                show_as_plain(flat.unsharded_params, False)
        for flat in unit.flats:
            flat.mirror()
    if summons.in_place and unit.gathers:
        unit.reshard()
        if summons.keep:  # backward goes on with the values as they are now
            unit.unshard()
            unit.wait()
            runtime.schedule.gathered[unit.index] = unit


# -- engine.apply -----------------------------------------------------------------------------------------------------


def apply(model: nn.Module, runtime: Runtime, fn: Callable[[nn.Module], Any]) -> None:
    """Carry out ``model.apply(fn)`` with full parameters, children first; what `fn` changes is kept. Collective.

    In each call the module's own parameters are full, and those of its children, too, if all of them are in one unit.
    Otherwise `fn` sees the children's parameters sharded, on which elementwise edits work.
    """
    units_for: dict[int, list[Unit]] = {}
    for module in model.modules():
        own = units_of(runtime, [p for p in module._parameters.values() if p is not None])
        below = units_of(runtime, module)
        units_for[id(module)] = below if len(below) <= 1 else own
    order: list[nn.Module] = []

    def visit(module: nn.Module) -> None:
        for child in module.children():
            visit(child)
        order.append(module)

    visit(model)
    at = 0
    while at < len(order):  # consecutive modules with the same units share one gathered()
        units = units_for[id(order[at])]
        stop = at + 1
        while stop < len(order) and units_for[id(order[stop])] == units:
            stop += 1
        # Also without units, so that all ranks compare what they do.
        with gathered(runtime, [u.params for u in units], write=True):
            for module in order[at:stop]:
                fn(module)
        at = stop
