"""``__torch_function__`` of a ShardTensor, which sees functions before they are decomposed into operators.

- Assignments to ``.data`` and ``.grad`` and registrations of hooks are intercepted (:mod:`.attributes`).
- *On demand*: for each function the parameter's unit decides if the unsharded parameter takes the ShardTensor's place. It is
  told if shards would do.
- A tensor that was computed from parameters on shards (`self.temp.exp()`) is gathered where a function needs it in full.
- So are gradients and optimizer state, for functions that only read them (:mod:`.full_tensor`).
- A function on shards can't give another, plain operand its gradient, and raises.

Below this level :mod:`.dispatch` decides what can be computed on shards.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..errors import NeedsGatherError
from ..numerics.stochastic_rounding import EXACT, is_loading
from .attributes import HANDLERS
from .autograd import (
    NORMS,
    GatherFull,
    autograd_grad,
    differentiable_sum,
    function_needs_gather,
    reduces_to_scalar,
    shared_gradient,
)
from .c10d_functions import EXCHANGES
from .dispatch import RANDOM
from .full_tensor import on_copies, substituted, to_gather
from .function_sets import (
    ARITHMETIC,
    COMPARISONS,
    CONVERSIONS,
    DENIED,
    DIMS_SECOND,
    DUNDER,
    EXTREMES,
    FORMS,
    INIT,
    LISTS,
    NEW,
    OWN,
    SCALAR,
    SHAPED_LIKE,
    creates,
    initialises,
)
from .spec import same_cut
from .unsharded_param import memory_of, recorded_edit

if TYPE_CHECKING:
    from .ports import UnitPort
    from .tensor import ShardTensor

__all__ = ["call", "computed_in", "computed_on"]

_NoTorchFunction = torch._C.DisableTorchFunctionSubclass


def computed_in(param: ShardTensor) -> torch.dtype | None:
    """Return the dtype that a parameter shows in place of its own; None where it shows its own.

    Inside a forward this is the dtype of the computation, because many models cast inputs to ``self.child.weight.dtype``.
    In ``Optimizer.load_state_dict`` it is the dtype of the optimizer's state.
    """
    unit = param._unit_ref() if param._unit_ref is not None else None
    if unit is not None and unit.rounding and is_loading() and unit.find(param)[0].rounding is not None:
        return EXACT
    if unit is None or not unit.casts or not _is_in_forward(unit):
        return None
    dtype: torch.dtype = unit.find(param)[0].compute
    return dtype


def computed_on(param: ShardTensor) -> torch.device | None:
    """Return the device that a parameter in host memory shows inside a forward; None where it shows its own.

    This is the device that computes, because models make tensors on ``self.child.weight.device``.
    """
    unit = param._unit_ref() if param._unit_ref is not None else None
    if unit is None or unit.host is None or not _is_in_forward(unit):
        return None
    device: torch.device = unit.host.device
    return device


def _is_in_forward(unit: UnitPort) -> bool:
    """Return True if a forward of the model runs, outside ``gathered()``, which shows parameters as they are stored."""
    return not unit.is_summoned and unit.in_forward


def call(cls: type[ShardTensor], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one torch function that has a ShardTensor among its arguments."""
    special = _SPECIAL.get(func)
    if special is not None:
        return special(cls, func, args, kwargs)
    name = _name(func)
    if name in OWN:
        with _NoTorchFunction():
            return func(*args, **kwargs)
    if name in FORMS and args:
        if not isinstance(args[0], cls):
            other = args[1] if name not in SHAPED_LIKE and len(args) > 1 else None
            dtype = computed_in(other) if isinstance(other, cls) else None
            if dtype is not None:
                return args[0].to(args[1].device, dtype, *args[2:], **kwargs)
            with _NoTorchFunction():
                return func(*args, **kwargs)
        if name in SHAPED_LIKE and len(args) == 2 and args[0]._unit_ref is None:
            args = (args[0], torch.empty(args[1].shape, device="meta"))  # the shape needs no unshard
    tensors: list[Any] = []
    _collect(args, tensors)
    if kwargs:
        _collect(kwargs.values(), tensors)
    for t in tensors:
        unit_ref = t._shard_state.unit_ref if isinstance(t, cls) else None
        if unit_ref is not None and unit_ref() is not None:
            return _on_demand(cls, func, name, args, kwargs, tensors)
    return _run(cls, func, name, args, kwargs, tensors)


def _name(func: Any) -> str:
    name = getattr(func, "__name__", "")
    if name in ("__get__", "__set__", "__delete__"):
        return f"{name}:{getattr(func.__self__, '__name__', '')}"
    return name.split(".", 1)[0]  # an ATen overload is called "add.Tensor"


def _collect(values: Any, found: list[Any]) -> None:
    for value in values:
        if isinstance(value, torch.Tensor):
            found.append(value)
        elif isinstance(value, (tuple, list)):
            _collect(value, found)


def _run(
    cls: type[ShardTensor], func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Any]
) -> Any:
    """Run a function on shards; where these don't suffice, on full copies of gradients and optimizer state."""
    if name in DENIED or name.removeprefix("__get__:") in DENIED:
        sharded = to_gather(cls, name, tensors, None) if name == "tolist" else []
        if not sharded:
            raise function_needs_gather(cls, name, tensors)
        return on_copies(cls, func, name, args, kwargs, sharded)
    derived, of_parameter = _descent(cls, tensors)
    if derived and not _shards_suffice(cls, name, args, kwargs, tensors):
        return _on_full_tensors(cls, func, name, args, kwargs, tensors)
    try:
        with _NoTorchFunction():
            if torch.is_grad_enabled() and len(tensors) > 1:
                for t in tensors:
                    if not isinstance(t, cls) and t.requires_grad:
                        why = "with a plain tensor that requires a gradient needs the whole parameter"
                        raise function_needs_gather(cls, name, tensors, why)
            if (name == "sum" or name == "mean") and tensors and tensors[0].requires_grad and torch.is_grad_enabled():
                return shared_gradient(differentiable_sum(cls, func, name, args, kwargs, tensors), tensors[0])
            if name in _SCALARS and torch.is_grad_enabled() and len(tensors) == 1 and tensors[0].requires_grad:
                return shared_gradient(func(*args, **kwargs), tensors[0])
            if name == "__setitem__" and _is_masked_fill(cls, args):
                target, mask, value = args
                return target.masked_fill_(mask, value.to(target.dtype) if isinstance(value, torch.Tensor) else value)
            result = func(*args, **kwargs)
            if of_parameter and _target(name, args, kwargs) is None and not creates(name):
                _note_origin(cls, name, args, kwargs, tensors, result)
            return result
    except NeedsGatherError:
        sharded = to_gather(cls, name, tensors, _target(name, args, kwargs))
        if not sharded:
            raise
    return on_copies(cls, func, name, args, kwargs, sharded)


_SCALARS = NORMS | EXTREMES | DIMS_SECOND


# Gradients and optimizer state are cut like parameters and have no unit, as have tensors that were computed from parameters.
# But nobody computes an output with gradients and optimizer state, so that these stay on shards. Hence `origin`, which tells
# them apart.
def _is_derived(t: Any) -> bool:
    """Return True if `t` was computed from parameters: ``temp.exp()``, ``p * 2``, a meta-learner's ``p - lr * grad``."""
    if t._shard_state.origin is not None:
        return True
    if not torch.is_grad_enabled():
        return False
    with _NoTorchFunction():
        return t.grad_fn is not None


def _descent(cls: type[ShardTensor], tensors: list[Any]) -> tuple[bool, bool]:
    """Return if any of the tensors was computed from parameters, and if any was so or is a parameter itself."""
    # Hot: every step of an optimizer asks this for each operand, hence no calls.
    derived = of_parameter = False
    recording = torch.is_grad_enabled()
    for t in tensors:
        if isinstance(t, cls):
            state = t._shard_state
            if state.origin is not None:
                return True, True
            of_parameter = of_parameter or state.unit_ref is not None
            derived = derived or (recording and _is_derived(t))
    return derived, of_parameter


def _note_origin(cls: type[ShardTensor], name: str, args: Any, kwargs: Any, tensors: list[Any], result: Any) -> None:
    """Note on new ShardTensors the unit of the parameter from which they were computed."""
    results: Any = [result] if isinstance(result, cls) else result if isinstance(result, (list, tuple)) else ()
    for new, operands in zip(results, _combined(name, args, kwargs, tensors), strict=False):
        if not isinstance(new, cls) or new._unit_ref is not None or any(new is t for t in operands):
            continue
        origins = [t._shard_state.unit_ref or t._shard_state.origin for t in operands if isinstance(t, cls)]
        # With a gradient or optimizer state among the operands, the result is an update.
        if origins and None not in origins:
            new._shard_state.origin = origins[0]


def _on_full_tensors(
    cls: type[ShardTensor], func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Any]
) -> Any:
    """Run a function with the full tensors in place of those that were computed from parameters. Collective."""
    target = _target(name, args, kwargs)
    if isinstance(target, cls) and _is_derived(target) and not name.startswith("__i"):
        # The function would edit the full tensor, which nobody keeps. `t += x` is right, since `t` becomes the result.
        raise function_needs_gather(cls, name, tensors, "in place needs the whole of what was computed from it")
    with _NoTorchFunction():
        fulls = {id(t): GatherFull.apply(t) for t in tensors if isinstance(t, cls) and _is_derived(t)}
    origins = [t._shard_state.origin for t in tensors if isinstance(t, cls)]
    units = [origin() for origin in origins if origin is not None]
    args = tuple(substituted(value, fulls) for value in args)
    result = func(*args, **{key: substituted(value, fulls) for key, value in kwargs.items()})
    unit = next((unit for unit in units if unit is not None), None)
    if unit is not None and not any(full.requires_grad for full in fulls.values()):
        copies: list[torch.Tensor] = []
        result = _own_memory(result, list(fulls.values()), copies)
        if copies:  # `(p * 2)[0].zero_()` would be lost
            unit.watch_copies(copies, f"what was computed from {_names_of(cls, tensors)}")
    return result


def _names_of(cls: type[ShardTensor], tensors: list[Any]) -> str:
    return " and ".join(dict.fromkeys(t._spec.name for t in tensors if isinstance(t, cls)))


# -- local arithmetic or not --------------------------------------------------------------------------------------


def _is_local(cls: type[ShardTensor], name: str, args: Any, kwargs: Any, tensors: list[Any]) -> bool:
    """Return True if shards suffice for a function, by its name and its operands' shapes.

    They do for elementwise arithmetic whose result has the ShardTensors' own shape, copies, fills, new tensors, conversions,
    lists of these, and reductions to a scalar.
    """
    if name in LISTS or name in NEW or name in CONVERSIONS or name in INIT or name in SCALAR:
        return True
    if name in EXTREMES:
        if len(tensors) == 1:
            return len(args) == 1 and not kwargs
        return _fits(cls, name, args, kwargs, tensors)
    if name in DIMS_SECOND or name in NORMS:
        return reduces_to_scalar(cls, name, args, kwargs, tensors)
    if name in COMPARISONS:
        return True
    if name in ARITHMETIC or name in RANDOM or (name.endswith("_") and name[:-1] in RANDOM):
        return _fits(cls, name, args, kwargs, tensors)
    if name == "__setitem__":
        return _is_masked_fill(cls, args)
    return False


def _is_masked_fill(cls: type[ShardTensor], args: Any) -> bool:
    """Return True for ``t[mask] = value`` with a mask of the full shape and one value."""
    target, mask, value = args
    return (
        isinstance(target, cls)
        and isinstance(mask, torch.Tensor)
        and mask.dtype == torch.bool
        and mask.shape == target._spec.shape
        and (not isinstance(value, torch.Tensor) or (value.dim() == 0 and not isinstance(value, cls)))
    )


def _fits(cls: type[ShardTensor], name: str, args: Any, kwargs: Any, tensors: list[Any]) -> bool:
    spec = None
    for t in tensors:
        if isinstance(t, cls):
            if spec is not None and not same_cut(spec, t._spec):
                return False
            spec = t._spec
    assert spec is not None
    if name == "where" and len(tensors) + sum(not isinstance(a, torch.Tensor) for a in args) < 3 and not kwargs:
        return False  # where(condition) gives indices
    target = _target(name, args, kwargs)
    if target is not None and not isinstance(target, cls):
        return False
    gradients = torch.is_grad_enabled()
    for t in tensors:
        if isinstance(t, cls):
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


def _target(name: str, args: Any, kwargs: Any) -> Any:
    """Return what a function writes to: a tensor, or a list of tensors; None if it makes its result."""
    if "out" in kwargs:
        return kwargs["out"]
    in_place = name.endswith("_") and not name.endswith("__")
    if in_place or name == "__setitem__" or (name.startswith("__i") and name in DUNDER and name != "__invert__"):
        return args[0] if args else None
    return None


def _shards_suffice(cls: type[ShardTensor], name: str, args: Any, kwargs: Any, tensors: list[Any]) -> bool:
    """Return True if each rank gets from shards what it would get from the full tensors."""
    if name in ARITHMETIC and name != "where":
        spec = None
        for t in tensors:  # the usual case, an optimizer's arithmetic: all operands are sharded and cut alike
            if not isinstance(t, cls) or (spec is not None and t._spec is not spec):
                break
            spec = t._spec
        else:
            return True
    return _is_local(cls, name, args, kwargs, tensors) and not _may_differ(cls, name, args, kwargs, tensors)


def _combined(name: str, args: Any, kwargs: Any, tensors: list[Any]) -> list[list[Any]]:
    """Return the groups of operands that are combined: one of all operands, or for functions of lists one a position."""
    if name not in LISTS:
        return [tensors]
    lists = [value for value in (*args, *kwargs.values()) if isinstance(value, (list, tuple))]
    return [[t for t in items if isinstance(t, torch.Tensor)] for items in zip(*lists, strict=False)]


def _may_differ(cls: type[ShardTensor], name: str, args: Any, kwargs: Any, tensors: list[Any]) -> bool:
    """Return True if parameters, or tensors computed from them, are combined with values that may differ between ranks.

    Such values are an input, a mask, random numbers. On shards the ranks' results would be mixed into one. But each rank must
    have its own result, and where there are gradients, their average.

    A write to a sharded tensor has one value for all ranks anyhow, and a combination with a gradient or optimizer state is one
    of sharded values. Neither has to communicate. A 0-dim tensor without a gradient counts as a number, such as an
    optimizer's learning rate, except in backward, where it comes from a rank's own gradient.
    """
    target = _target(name, args, kwargs)
    if name in FORMS or isinstance(target, (cls, list, tuple)):
        return False
    if torch.is_grad_enabled():
        with _NoTorchFunction():
            trains = any(isinstance(t, cls) and t.requires_grad for t in tensors)
        if trains:
            return name in RANDOM or any(not isinstance(t, cls) for t in tensors)
    return name in RANDOM or any(_mixes(cls, operands) for operands in _combined(name, args, kwargs, tensors))


def _mixes(cls: type[ShardTensor], operands: list[Any]) -> bool:
    """Return True if plain and sharded tensors are mixed, and all sharded ones are, or were computed from, parameters."""
    sharded = [t for t in operands if isinstance(t, cls)]
    if not 0 < len(sharded) < len(operands):
        return False
    numbers = torch._C._current_graph_task_id() == -1
    return any(not isinstance(t, cls) and (t.dim() or not numbers) for t in operands) and all(
        t._unit_ref is not None or _is_derived(t) for t in sharded
    )


# -- on demand ----------------------------------------------------------------------------------------------------


def _on_demand(
    cls: type[ShardTensor], func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Any]
) -> Any:
    """Run a function with the unsharded parameters in place of those whose unit says so. May be collective."""
    leaves: dict[int, Any] = {}
    originals: list[Any] = []
    asked: list[Any] = []
    local_ok: bool | None = None
    if torch.is_grad_enabled():
        _refuse_recorded_edit(cls, _target(name, args, kwargs), name, tensors)
    result: Any = None
    copies: list[torch.Tensor] = []
    try:
        for t in tensors:
            if not isinstance(t, cls) or id(t) in leaves or t._unit_ref is None:
                continue
            unit = t._unit_ref()
            if unit is None:
                continue
            if local_ok is None:
                local_ok = _shards_suffice(cls, name, args, kwargs, tensors)
            dtypes = frozenset(o.dtype for o in tensors if not isinstance(o, cls)) if unit.casts else frozenset()
            leaf = unit.on_demand(t, func, local_ok, dtypes)
            if leaf is None:
                continue
            asked.append(unit)
            with _NoTorchFunction():
                if leaf.requires_grad and not t.requires_grad:
                    leaf = leaf.detach()  # `t` is a detached alias of the parameter
            leaves[id(t)] = leaf
            originals.append(t)
        if not leaves:
            return _run(cls, func, name, args, kwargs, tensors)
        args = tuple(substituted(value, leaves) for value in args)
        kwargs = {key: substituted(value, leaves) for key, value in kwargs.items()}
        result = func(*args, **kwargs)
        # An in-place function returns its operand: `module.weight += 1` must not put the unsharded parameter into the module.
        for t in originals:
            if result is leaves[id(t)]:
                result = t
        if asked and not any(unit.is_summoned for unit in asked):
            result = _own_memory(result, [leaves[id(t)] for t in originals], copies)
        return result
    finally:
        for unit in reversed(asked):
            unit.on_demand_done(result, copies, _names_of(cls, originals))


def _refuse_recorded_edit(cls: type[ShardTensor], target: Any, name: str, tensors: list[Any]) -> None:
    if not isinstance(target, cls) or target._unit_ref is None or len(tensors) < 2 or initialises(name):
        return
    with _NoTorchFunction():
        if not target.requires_grad and any(t.requires_grad for t in tensors):
            raise recorded_edit(target._spec.name, target._spec.world_rank)


def _own_memory(result: Any, leaves: list[Any], copies: list[torch.Tensor]) -> Any:
    """Return `result` with copies in place of views of unsharded parameters (`weight.t()`, `weight[:n]`).

    A view would outlive its memory, which is freed when the unit is resharded. A copy carries the gradient back as the view
    would. The copies are also appended to `copies`.
    """
    if isinstance(result, (tuple, list)) and result and all(isinstance(r, torch.Tensor) for r in result):
        items = [_own_memory(r, leaves, copies) for r in result]
        return type(result)(items) if type(result) in (tuple, list) else result
    if not isinstance(result, torch.Tensor):
        return result
    memory = memory_of(result)  # of a DTensor, too
    if type(memory) is torch.Tensor and memory.numel() and memory.layout is torch.strided:
        storage = memory.untyped_storage()._cdata
        if any(memory_of(leaf).untyped_storage()._cdata == storage for leaf in leaves):
            copies.append(_copy(result))
            return copies[-1]
    return result


def _copy(tensor: torch.Tensor) -> torch.Tensor:
    if not torch.is_inference_mode_enabled():
        return tensor.clone()
    with torch.inference_mode(False), torch.no_grad():  # an inference tensor would not show whether it was edited
        return tensor.clone()


_SPECIAL: dict[Any, Callable[[Any, Any, Any, Any], Any]] = {
    **HANDLERS,
    **EXCHANGES,
    torch.autograd.grad: autograd_grad,
}
