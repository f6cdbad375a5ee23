"""``__torch_function__`` of a ShardTensor, which sees functions before they are decomposed into operators.

- Registrations of hooks and collectives of torch.distributed are intercepted.
- *On demand*: for each function the parameter's unit decides whether the unsharded parameter takes the ShardTensor's place,
  knowing whether shards would do.
- A tensor that was computed from parameters on shards (`self.temp.exp()`) is gathered where a function needs it in full.
- So are gradients and optimizer state, for functions that only read them (:mod:`.full_tensor`).
- A function on shards that would have to give a plain operand a gradient raises.

Below this level :mod:`.dispatch` decides what can be computed on shards.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..errors import NeedsGatherError
from ..numerics.stochastic_rounding import EXACT
from ..utils.autograd_private import graph_task
from ..utils.pytree import own_memory, storage_of, tensors_in
from . import derivation
from .aliases import is_leaf_alias
from .attributes import HANDLERS
from .autograd import (
    GatherFull,
    ShardedGradient,
    autograd_grad,
    reduces_to_scalar,
    shared_gradient,
)
from .c10d_functions import COLLECTIVES
from .dispatch import RANDOM
from .full_tensor import edit_in_full, on_copies, to_gather
from .function_call import FunctionCall, name_of
from .function_sets import (
    ALWAYS_LOCAL,
    ARITHMETIC,
    DENIED,
    EXPORTS,
    EXTREMES,
    FORMS,
    IN_PLACE_OPERATORS,
    LISTS,
    NORMS,
    OWN,
    SCALAR_REDUCTIONS,
    SCALARS,
    SHAPED_LIKE,
    creates,
    initialises,
)
from .spec import gather_error, same_cut
from .tensor import ShardTensor
from .unsharded_param import lost_graph, recorded_edit

_NoTorchFunction = torch._C.DisableTorchFunctionSubclass


def computed_in(param: ShardTensor) -> torch.dtype | None:
    """Return the dtype that a parameter shows in place of its own; None where it shows its own.

    Inside a forward this is the dtype of the computation, because many models cast inputs to ``self.child.weight.dtype``.
    In ``Optimizer.load_state_dict`` it is the dtype of the optimizer's state. Inside ``gathered()`` parameters are shown as they
    are stored.
    """
    unit = param._unit
    if unit is not None and unit.rounding and _is_loading() and unit.find(param)[0].rounding is not None:
        return EXACT
    if unit is None or not unit.casts or unit.is_summoned or not unit.runtime.in_forward:
        return None
    dtype: torch.dtype = unit.find(param)[0].compute
    return dtype


_LOADS: Any = torch.optim.Optimizer._process_value_according_to_param_policy.__code__


def _is_loading() -> bool:
    """Return True if ``Optimizer.load_state_dict`` reads the ``dtype``: it converts state to that dtype, and would round it.

    Only :func:`computed_in` may call this, because the reader is found by the number of frames.
    """
    return sys._getframe(3).f_code is _LOADS


def computed_on(param: ShardTensor) -> torch.device | None:
    """Return the device that a parameter in host memory shows inside a forward; None where it shows its own.

    This is the device that computes, because models make tensors on ``self.child.weight.device``.
    """
    unit = param._unit
    if unit is None or unit.host is None or unit.is_summoned or not unit.runtime.in_forward:
        return None
    device: torch.device = unit.host.device
    return device


def call(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one torch function that has a ShardTensor among its arguments."""
    special = _SPECIAL.get(func)
    if special is not None:
        return special(func, args, kwargs)
    name = name_of(func)
    if name in OWN:
        with _NoTorchFunction():
            return func(*args, **kwargs)
    if name in FORMS and args:
        if not isinstance(args[0], ShardTensor):
            other = args[1] if len(args) > 1 else kwargs.get("tensor", kwargs.get("other"))
            if name not in SHAPED_LIKE and isinstance(other, ShardTensor):
                # torch itself would read the shards' own device and dtype, not those that the parameter shows.
                options = {key: value for key, value in kwargs.items() if value is not other}
                return args[0].to(other.device, other.dtype, *args[2:], **options)
            with _NoTorchFunction():
                return func(*args, **kwargs)
        if name in SHAPED_LIKE and len(args) == 2 and args[0]._unit_ref is None:
            args = (args[0], torch.empty(args[1].shape, device="meta"))  # the shape needs no unshard
    this = FunctionCall(func, name, args, kwargs)
    of_unit = any([isinstance(t, ShardTensor) and t._unit is not None for t in this.tensors])  # noqa: C419 (hot)
    run = _on_demand if of_unit else _run
    if not torch.is_grad_enabled():
        return run(this)
    if _is_recorded_edit(this):
        return _edit_unrecorded(this, run)
    lost = next((t for t in this.sharded if t._shard_state.unrecorded and t is not this.target), None)
    return run(this) if lost is None else _not_recorded(run(this), lost)


def _run(call: FunctionCall) -> Any:
    """Run a function on shards; where these don't suffice, on full copies of gradients and optimizer state."""
    func, name, args, kwargs, tensors = call.func, call.name, call.args, call.kwargs, call.tensors
    if name in DENIED or name.removeprefix("__get__:") in DENIED:
        if name not in EXPORTS or not isinstance(args[0], ShardTensor):
            raise gather_error(tensors, name)
        return _exported(call, args[0])
    if name == "_foreach_norm" and _records(tensors):
        return _norms(*args, **kwargs)
    derived, of_parameter = _descent(tensors)
    if derived and not _shards_suffice(call):
        return _on_full_tensors(call)
    if name in SCALARS and (derived or any(isinstance(t, ShardTensor) and t._shard_state.copied_from for t in tensors)):
        what, recording = f"{name} of what was computed from {_names_of(tensors)}", _records(tensors)
        with derivation.reading(tensors, what, recording, call) as read:
            if read is not None:
                return derivation.on_full_values(call, read)
    try:
        with _NoTorchFunction():
            if torch.is_grad_enabled():
                if len(tensors) == 1 and name in _SCALARS and tensors[0].requires_grad:
                    return shared_gradient(call.run(tensors, [ShardedGradient.apply(tensors[0])]), tensors[0])
                if len(tensors) > 1 and any(not isinstance(t, ShardTensor) and t.requires_grad for t in tensors):
                    why = "with a plain tensor that requires a gradient needs the full parameter"
                    raise gather_error(tensors, name, why)
            if name == "__setitem__" and _is_masked_fill(args):
                target, mask, value = args
                return target.masked_fill_(mask, value.to(target.dtype) if isinstance(value, torch.Tensor) else value)
            result = func(*args, **kwargs)
            if of_parameter and call.target is None and not creates(name):
                derivation.note(call, result if isinstance(result, (list, tuple)) else [result], _combined(call))
            return result
    except NeedsGatherError:
        if edit_in_full(call):
            return call.target
        sharded = to_gather(call)
        if not sharded:
            raise
    return _on_copies(call, sharded)


def _on_copies(call: FunctionCall, sharded: list[Any]) -> Any:
    """Run a function with full copies in place of `sharded`. Collective, unless this rank reads alone."""
    more = f" and {len(sharded) - 1} more" if len(sharded) > 1 else ""
    with torch.inference_mode(False):  # an inference tensor would not show whether it was edited
        copies = derivation.fulls(sharded, f"{call.name} of the sharded {sharded[0]._spec.name}{more}")
    return on_copies(call, sharded, copies)


def _exported(call: FunctionCall, tensor: ShardTensor) -> Any:
    """Return a full copy as Python numbers, or as a read-only NumPy array. Collective, unless this rank reads alone."""
    if derivation.unit_of_origin(tensor) is None:
        sharded = to_gather(call)
        if not sharded:
            raise gather_error(call.tensors, call.name)
        result = _on_copies(call, sharded)
    else:
        if call.name != "tolist" and tensor.requires_grad and not call.kwargs.get("force"):
            torch.empty(0, requires_grad=True).numpy()  # raises what plain torch raises
        result = call.run([tensor], [tensor.full_tensor()])
    if call.name != "tolist":
        result.flags.writeable = False  # an edit would be lost
    return result


def _norms(
    tensors: Sequence[torch.Tensor], ord: float = 2.0, dtype: torch.dtype | None = None
) -> tuple[torch.Tensor, ...]:
    """Return the result of ``torch._foreach_norm``, computed one norm at a time, because each of these has a derivative."""
    return tuple(torch.linalg.vector_norm(t, ord, dtype=dtype) for t in tensors)


_SCALARS = NORMS | EXTREMES | SCALAR_REDUCTIONS


# -- tensors that were computed from parameters -----------------------------------------------------------------------


# Gradients and optimizer state are cut like parameters and have no unit, as have tensors that were computed from parameters.
# But no model computes an output with gradients and optimizer state, so that these stay on shards. Hence `origin`, which tells
# them apart.
def _is_derived(t: Any) -> bool:
    """Return True if `t` was computed from parameters: ``temp.exp()``, ``p * 2``, a meta-learner's ``p - lr * grad``.

    So was ``p.detach().requires_grad_()``, where gradients are recorded: the leaf has a gradient of its own.
    """
    if t._shard_state.origin is not None:
        return True
    if not torch.is_grad_enabled():
        return False
    with _NoTorchFunction():
        return t.grad_fn is not None or is_leaf_alias(t)


def _descent(tensors: list[Any]) -> tuple[bool, bool]:
    """Return two flags: any of the tensors was computed from parameters; any was, or is a parameter itself."""
    # Hot: every step of an optimizer asks this for each operand, hence no calls.
    derived = of_parameter = False
    recording = torch.is_grad_enabled()
    for t in tensors:
        if isinstance(t, ShardTensor):
            state = t._shard_state
            if state.origin is not None:
                return True, True
            of_parameter = of_parameter or state.unit_ref is not None
            derived = derived or (recording and _is_derived(t))
    return derived, of_parameter


def _on_full_tensors(call: FunctionCall) -> Any:
    """Run a function with the full tensors in place of those that were computed from parameters. Collective."""
    target = call.target
    if (
        isinstance(target, ShardTensor)
        and _is_derived(target)
        and (call.name not in IN_PLACE_OPERATORS or target._unit is not None)
    ):
        # The function would edit the full tensor, which is dropped. After `t += x`, `t` is the result, which is right unless `t`
        # shares its memory with a parameter.
        raise gather_error(call.tensors, call.name, "in place needs all of what was computed from it")
    derived = [t for t in call.sharded if _is_derived(t)]
    with _NoTorchFunction():
        fulls = [_as_shown(GatherFull.apply(t), t) for t in derived]
    result = call.run(derived, fulls)
    unit = next((unit for t in derived if (unit := derivation.unit_of_origin(t)) is not None), None)
    if unit is not None:
        result, copies = own_memory(result, tensors_in(result), set(map(storage_of, fulls)))
        if copies:  # `(p * 2)[0].zero_()` would be lost
            unit.runtime.on_demand.watch_copies(copies, f"what was computed from {_names_of(call.tensors)}")
    return result


def _as_shown(full: torch.Tensor, t: ShardTensor) -> torch.Tensor:
    """Return the full values of `t` with the dtype and on the device that `t` shows."""
    if t._unit is None:
        return full
    return full.to(computed_on(t) or full.device, computed_in(t) or full.dtype)


def _records(tensors: list[Any]) -> bool:
    """Return True if autograd would record a function of these tensors."""
    with _NoTorchFunction():
        return torch.is_grad_enabled() and any(t.requires_grad for t in tensors)


def _names_of(tensors: list[Any]) -> str:
    return " and ".join(dict.fromkeys(t._spec.name for t in tensors if isinstance(t, ShardTensor)))


# -- local arithmetic or not --------------------------------------------------------------------------------------


def _is_local(call: FunctionCall) -> bool:
    """Return True if shards suffice for a function, by its name and its operands' shapes.

    They do for elementwise arithmetic whose result has the ShardTensors' own shape, copies, fills, new tensors, conversions,
    lists of these, and reductions to a scalar.
    """
    name, args = call.name, call.args
    if name in ALWAYS_LOCAL:
        return True
    if name in EXTREMES and len(call.tensors) == 1:
        return len(args) == 1 and not call.kwargs
    if name in SCALAR_REDUCTIONS or name in NORMS:
        return reduces_to_scalar(name, args, call.kwargs, call.tensors)
    if name in ARITHMETIC or name in EXTREMES or name.removesuffix("_") in RANDOM:
        return _fits(call)
    return name == "__setitem__" and _is_masked_fill(args)


def _is_masked_fill(args: Any) -> bool:
    """Return True for ``t[mask] = value`` with a mask of the full shape and one value."""
    target, mask, value = args
    return (
        isinstance(target, ShardTensor)
        and isinstance(mask, torch.Tensor)
        and mask.dtype == torch.bool
        and mask.shape == target._spec.shape
        and (not isinstance(value, torch.Tensor) or (value.dim() == 0 and not isinstance(value, ShardTensor)))
    )


def _fits(call: FunctionCall) -> bool:
    """Return True if the result of an elementwise function has the ShardTensors' shape, and all of these are cut alike."""
    specs = [t._spec for t in call.tensors if isinstance(t, ShardTensor)]
    spec = specs[0]
    if not all(same_cut(spec, other) for other in specs):
        return False
    numbers = sum(not isinstance(a, torch.Tensor) for a in call.args)
    if call.name == "where" and len(call.tensors) + numbers < 3 and not call.kwargs:
        return False  # where(condition) gives indices
    target = call.target
    if target is not None and not isinstance(target, ShardTensor):
        return False
    gradients = torch.is_grad_enabled()
    for t in call.tensors:
        if isinstance(t, ShardTensor):
            continue
        if gradients and t.requires_grad:
            return False  # its gradient would have to be collected from all ranks
        if t.dim() and t.shape != spec.shape:
            try:
                if torch.broadcast_shapes(spec.shape, t.shape) != spec.shape:
                    return False
            except RuntimeError:
                return True  # plain torch rejects the shapes, and so will the function on shards
    return True


def _shards_suffice(call: FunctionCall) -> bool:
    """Return True if each rank gets from shards what it would get from the full tensors."""
    if call.name in ARITHMETIC and call.name != "where":
        spec = None
        for t in call.tensors:  # the usual case, an optimizer's arithmetic: all operands are sharded and cut alike
            if not isinstance(t, ShardTensor) or (spec is not None and t._spec is not spec):
                break
            spec = t._spec
        else:
            return True
    return _is_local(call) and not _may_differ(call)


def _combined(call: FunctionCall) -> list[list[Any]]:
    """Return the groups of operands that are combined: one of all operands; one for each position of a function of lists."""
    if call.name not in LISTS:
        return [call.tensors]
    lists = [value for value in (*call.args, *call.kwargs.values()) if isinstance(value, (list, tuple))]
    return [[t for t in items if isinstance(t, torch.Tensor)] for items in zip(*lists, strict=False)]


def _may_differ(call: FunctionCall) -> bool:
    """Return True if parameters, or tensors computed from them, are combined with values that may differ between ranks.

    Such values are an input, a mask, random numbers. On shards the ranks' results would be mixed into one. But each rank must
    have its own result, and where there are gradients, their average.

    A write to a sharded tensor has one value for all ranks anyhow, and a combination with a gradient or optimizer state is one
    of sharded values. Neither has to communicate. A 0-dim tensor without a gradient counts as a number, such as an
    optimizer's learning rate, except in backward, where it comes from a rank's own gradient.
    """
    target = call.target
    if isinstance(target, (list, tuple)) and target and not any(isinstance(t, ShardTensor) for t in target):
        return True  # each rank has plain tensors of its own, such as averages of the weights, and writes to them
    if call.name in FORMS or isinstance(target, (ShardTensor, list, tuple)):
        return False
    if call.name in RANDOM:
        return True
    if torch.is_grad_enabled():
        with _NoTorchFunction():
            trains = any(isinstance(t, ShardTensor) and t.requires_grad for t in call.tensors)
        if trains:
            return any(not isinstance(t, ShardTensor) for t in call.tensors)
    return any(map(_mixes, _combined(call)))


def _mixes(operands: list[Any]) -> bool:
    """Return True if plain and sharded tensors are mixed, and all sharded ones are, or were computed from, parameters."""
    sharded = [t for t in operands if isinstance(t, ShardTensor)]
    if not 0 < len(sharded) < len(operands):
        return False
    numbers = graph_task() == -1
    return any(not isinstance(t, ShardTensor) and (t.dim() or not numbers) for t in operands) and all(
        t._unit_ref is not None or _is_derived(t) for t in sharded
    )


# -- on demand ----------------------------------------------------------------------------------------------------


def _on_demand(call: FunctionCall) -> Any:
    """Run a function with unsharded parameters in place of sharded ones, where their unit decides so. May be collective."""
    unsharded: dict[int, Any] = {}
    originals: list[Any] = []
    asked: list[Any] = []
    local_ok: bool | None = None
    recording = torch.is_grad_enabled()
    result: Any = None
    copies: list[torch.Tensor] = []
    try:
        for t in call.tensors:
            unit = t._unit if isinstance(t, ShardTensor) and id(t) not in unsharded else None
            if unit is None or (recording and is_leaf_alias(t)):  # computed with in full, below
                continue
            if local_ok is None:
                local_ok = _shards_suffice(call)
            others = (o for o in call.tensors if not isinstance(o, ShardTensor))
            dtypes = frozenset(o.dtype for o in others) if unit.casts else frozenset()
            param = unit.runtime.on_demand.begin(unit, t, call, local_ok, dtypes)
            if param is None:
                continue
            asked.append(unit)
            with _NoTorchFunction():
                if param.requires_grad and not t.requires_grad:
                    param = param.detach()  # `t` is a detached alias of the parameter
            unsharded[id(t)] = param
            originals.append(t)
        if not originals:
            return _run(call)
        params = [unsharded[id(t)] for t in originals]
        result = call.run(originals, params)
        # An in-place function returns its operand: `module.weight += 1` must not put the unsharded parameter into the module.
        for t, param in zip(originals, params, strict=True):
            if result is param:
                result = t
        if not any(unit.is_summoned for unit in asked):
            # A view (`weight.t()`, `weight[:n]`) would outlive its memory, which is freed when the unit is resharded.
            result, copies = own_memory(result, tensors_in(result), set(map(storage_of, params)))
        return result
    finally:
        for unit in reversed(asked):
            unit.runtime.on_demand.end(unit, result, copies, _names_of(originals))


def _is_recorded_edit(call: FunctionCall) -> bool:
    """Return True if plain torch would make what is edited a part of a graph: a parameter, an alias or a copy of one."""
    target = call.target
    if not isinstance(target, ShardTensor) or len(call.tensors) < 2 or initialises(call.name):
        return False
    if target._unit_ref is None and target._shard_state.origin is None:
        return False
    with _NoTorchFunction():
        return not target.requires_grad and any(
            t.requires_grad or (isinstance(t, ShardTensor) and t._shard_state.unrecorded) for t in call.tensors
        )


def _edit_unrecorded(call: FunctionCall, run: Callable[[FunctionCall], Any]) -> Any:
    """Run an edit of an alias or copy (``p.data += b @ a``), whose graph programs usually drop at once, without recording it.

    Raises:
        ShardError: the parameter itself is edited.
    """
    target = call.target
    if target._shard_state.is_parameter:
        raise recorded_edit(target._spec.name, target._spec.world_rank)
    with torch.no_grad():
        result = run(call)
    target._shard_state.unrecorded = True
    return result


def _not_recorded(result: Any, edited: ShardTensor) -> Any:
    """Return the result of a function of `edited`, an alias or copy that :func:`_edit_unrecorded` has edited.

    Raises:
        ShardError: the result would be a part of that graph.
    """
    if any(t is not edited and (t.is_floating_point() or t.is_complex()) for t in tensors_in(result)):
        raise lost_graph(edited._spec.name, edited._spec.world_rank)
    return result


_SPECIAL: dict[Any, Callable[[Any, Any, Any], Any]] = {
    **HANDLERS,
    **COLLECTIVES,
    torch.autograd.grad: autograd_grad,
}
