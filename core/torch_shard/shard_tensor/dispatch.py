"""``__torch_dispatch__`` of a ShardTensor: an explicit table of the operators that it allows.

Elementwise operators run on the local shards. Reductions to a scalar reduce the local shard and add one small collective
(:mod:`.reductions`). Views are ShardTensors over a part of the same shard (:mod:`.views`). Every other operator raises
:class:`~torch_shard.errors.NeedsGatherError`. torch's operator tags don't tell these apart: ``aten::equal`` is tagged
pointwise, and ``_foreach_norm`` is a ``_foreach_`` operator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from .aliases import note_alias
from .changes import changing, remember
from .reductions import REDUCTIONS, foreach_norm, unscale_and_check
from .spec import ShardSpec, broadcast_shard, gather_error, refuse_unreduced, same_cut, shard_of_full
from .state import is_mixed
from .tensor import ShardTensor
from .views import VIEWS, following, view

_UNARY = """
abs absolute acos acosh angle asin asinh atan atanh bitwise_not ceil conj_physical cos cosh deg2rad
digamma elu erf erfc erfinv exp exp2 expm1 fix floor frac gelu hardsigmoid hardswish hardtanh i0
isfinite isinf isnan isneginf isposinf leaky_relu lgamma log log10 log1p log2 log_sigmoid
logical_not logit mish mvlgamma nan_to_num neg negative positive polygamma rad2deg reciprocal relu
relu6 round rsqrt selu sgn sigmoid sign signbit silu sin sinc sinh softplus softshrink hardshrink
special_erfcx special_i0e special_i1 special_i1e special_ndtri special_log_ndtr special_entr
sqrt square tan tanh threshold trunc celu
"""
_BINARY = """
add sub subtract rsub mul multiply div divide true_divide floor_divide fmod remainder pow float_power
atan2 arctan2 copysign hypot maximum minimum fmax fmin eq ne lt le gt ge greater less greater_equal
less_equal not_equal logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor
bitwise_left_shift bitwise_right_shift __and__ __or__ __xor__ __lshift__ __rshift__ __iand__ __ior__
__ixor__ __ilshift__ __irshift__ xlogy special_xlog1py logaddexp logaddexp2 nextafter ldexp gcd lcm
heaviside clamp clip clamp_min clamp_max lerp addcmul addcdiv where masked_fill isclose
"""
# Derivatives of these operators, which autograd calls.
_BACKWARD = """
sigmoid_backward tanh_backward threshold_backward gelu_backward silu_backward softplus_backward
leaky_relu_backward elu_backward hardsigmoid_backward hardswish_backward hardtanh_backward
logit_backward mish_backward softshrink_backward hardshrink_backward
"""
# Copies, and operators that read shape, dtype and device only.
_COPIES = "copy fill zero zeros_like ones_like full_like empty_like clone _to_copy _conj resolve_conj resolve_neg"

ELEMENTWISE: frozenset[str] = frozenset((_UNARY + _BINARY + _BACKWARD + _COPIES).split())
"""Operators (without the ``_`` of their in-place form) that combine elements at one position."""

_FOREACH_BASES = """
add sub mul div pow addcmul addcdiv lerp maximum minimum clamp_min clamp_max copy zero abs acos asin
atan ceil cos cosh erf erfc exp expm1 floor frac lgamma log log10 log1p log2 neg reciprocal round
rsqrt sigmoid sign sin sinh sqrt tan tanh trunc clone
"""
FOREACH: frozenset[str] = frozenset("_foreach_" + name for name in _FOREACH_BASES.split())
"""Elementwise operators over lists of tensors (without the ``_`` of their in-place form)."""

FUSED: frozenset[str] = frozenset({"_fused_adam", "_fused_adamw", "_fused_sgd", "_fused_adagrad"})
"""Optimizer steps over lists of tensors; all in place at Python level."""

RANDOM = frozenset({"normal", "uniform", "bernoulli", "exponential", "random", "log_normal", "cauchy", "geometric"})
"""In-place random fills (without the ``_``)."""

_RANDOM_LIKE = frozenset({"rand_like", "randn_like", "randint_like"})
_NEW = frozenset({"new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided"})
NEW_TENSORS: frozenset[str] = _NEW | _RANDOM_LIKE
"""Operators that take shape, strides, dtype and device of a tensor for a new one."""

_CLONES = frozenset({"clone", "_to_copy"})  # whose results have the values of their operand
_ALIASES = frozenset({"detach", "alias", "lift_fresh", "lift"})


def dispatch(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one ATen operator that has a ShardTensor among its arguments, or raise."""
    if func.namespace == "aten":
        name = func._opname
        base = name[:-1] if name.endswith("_") and not name.endswith("__") else name
        if base in ELEMENTWISE:
            return _elementwise(func, name, base, args, kwargs)
        if torch.is_inference_mode_enabled():
            # In inference mode composite functions (`to`, `view_as`, `max` of two tensors) arrive here undecomposed.
            result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
        handler = _HANDLERS.get(base)
        if handler is not None:
            return handler(func, args, kwargs)
    refuse_unreduced((args, kwargs), func)
    raise gather_error((args, kwargs), func)


def _common_spec(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[ShardSpec, bool]:
    """Return the spec that all sharded operands share; True if each rank has a shard of its own version of one of them."""
    spec: ShardSpec | None = None
    mixed = False
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, ShardTensor):
            state = value._shard_state
            own, mixed = state.spec, mixed or state.mixed
            if spec is None:
                spec = own
            elif own is not spec and not same_cut(spec, own):
                raise gather_error((args, kwargs), func, "needs both cut alike, and they are not")
    if spec is None:
        raise gather_error((args, kwargs), func)
    return spec, mixed


def _elementwise(func: Any, name: str, base: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    spec, mixed = _common_spec(func, args, kwargs)
    if len(args) == 1 and name == "where":  # where(condition) gives indices
        raise gather_error((args, kwargs), func)
    target: Any = None
    if name is not base or name.startswith("__i"):
        target = args[0]
    elif "out" in kwargs:
        target = kwargs["out"]
    if target is not None and not isinstance(target, ShardTensor):
        raise gather_error((args, kwargs), func, "cannot be written into a plain tensor from shards")
    local_args = [_local(value, spec, func) for value in args]
    local_kwargs = {key: _local(value, spec, func) for key, value in kwargs.items()}
    # The shards are 1-D, and the result's strides are those of the parameter, whatever was asked for.
    local_kwargs.pop("memory_format", None)
    if target is not None:
        if mixed:
            _mix(target, func, args[1:2] if base in _OVERWRITES else (*args, *kwargs.values()))
        with changing([target], args[1:2] if base == "copy" else ()):
            func(*local_args, **local_kwargs)
            _count_edit(target)
        return target
    result = func(*local_args, **local_kwargs)
    wrapped = ShardTensor._wrap(result, spec)
    if mixed and not base.endswith("_like"):
        wrapped._shard_state.mixed = True
    if name == "_to_copy":
        wrapped._shard_state.converted = True  # see ShardTensor.__tensor_flatten__
    if base in _CLONES and result.dtype == args[0]._shard_state.local.dtype:
        remember(wrapped, args[0])
    return wrapped


_OVERWRITES = ("copy", "fill", "zero")  # in place, after which nothing is left of the earlier values


def _mix(target: Any, func: Any, sources: Sequence[Any]) -> None:
    """Note on `target`, which is about to be computed in place from `sources`, whether one of these differs between the ranks.

    Raises:
        NeedsGatherError: one does, and the target is a parameter, whose shards would no longer belong to one tensor.
    """
    state = target._shard_state
    if state.unit_ref is not None:
        refuse_unreduced(sources, func)
    state.mixed = any(map(is_mixed, sources))


def _count_edit(target: ShardTensor) -> None:
    """Increment the version of the shard, which tells the engine that the unsharded parameter is out of date.

    Below autograd torch does not increment it, and an alias (`p.data`) has a version counter of its own. An edit of `grad.data`
    is one of the gradient, too.
    """
    state = target._shard_state
    torch.autograd.graph.increment_version(state.local)
    if state.alias_of is not None:
        torch.autograd.graph.increment_version(state.alias_of)


_FILLS = ("fill", "fill_", "masked_fill", "masked_fill_")


def _local(value: Any, spec: ShardSpec, func: Any) -> Any:
    if isinstance(value, ShardTensor):
        return value._shard_state.local
    if isinstance(value, torch.Tensor):
        if value.dim() == 0 and func._opname in _FILLS:
            return value  # is not promoted, and must stay 0-dim
        local = broadcast_shard(value, spec, func)
        # For type promotion a 0-dim parameter and a 0-dim plain operand are equals. The parameter's shard is 1-D, so the
        # operand is made 1-D, too.
        return local.expand(spec.length) if local.dim() == 0 and not spec.shape else local
    return value


# -- aliases and new tensors --------------------------------------------------------------------------------------


def alias(source: Any) -> ShardTensor:
    """Return another ShardTensor of the same shard; an alias of a parameter can be unsharded as the parameter can."""
    result = ShardTensor._wrap(source._local, source._spec, source._unit_ref)
    result._shard_state.origin = source._shard_state.origin
    if source._unit_ref is None:
        state, own = source._shard_state, result._shard_state
        own.copied_from, own.mixed, own.read_own = state.copied_from, state.mixed, state.read_own
        if state.origin is None and not source.is_inference():
            own.alias_of = source if state.alias_of is None else state.alias_of
    return following(source, note_alias(source, result))


def _alias(func: Any, args: Any, kwargs: Any) -> Any:
    source = args[0]
    if func._opname == "detach_":
        return source
    if torch.is_inference_mode_enabled() and not source.is_inference():
        # An alias shares the version counter of an ordinary tensor; inference tensors have none.
        with torch.inference_mode(False):
            return alias(source)
    return alias(source)


def _new(func: Any, args: Any, kwargs: Any) -> Any:
    source, size = args[0], tuple(args[1])
    spec, name = source._spec, func._opname
    options = {key: value for key, value in kwargs.items() if key in ("dtype", "device", "pin_memory")}
    strided = name == "new_empty_strided"
    if size != spec.shape or (strided and tuple(args[2]) != spec.stride):
        return func(source._local, size, *args[2:], **options)
    if strided:
        return ShardTensor._wrap(source._local.new_empty(spec.length, **options), spec)
    return ShardTensor._wrap(func(source._local, (spec.length,), *args[2:], **options), spec)


def _random(func: Any, args: Any, kwargs: Any) -> Any:
    # Each rank draws the full tensor. So a seed gives the values of plain torch, and the ranks' generators stay in step.
    target, name = args[0], func._opname
    if not isinstance(target, ShardTensor):
        raise gather_error((args, kwargs), func, "cannot be written into a plain tensor from shards")
    if name in RANDOM or (len(args) > 1 and isinstance(args[1], ShardTensor)):
        raise gather_error((args, kwargs), func)  # torch.bernoulli(probabilities), bernoulli_(probabilities)
    local, spec = target._local, target._spec
    full = torch.empty_strided(spec.shape, spec.stride, dtype=local.dtype, device=local.device)
    drawn = shard_of_full(func(full, *args[1:], **kwargs), spec)
    if name in _RANDOM_LIKE:
        return ShardTensor._wrap(drawn.clone(), spec)
    with changing([target]):
        local.copy_(drawn)
        _count_edit(target)
    return target


def _is_pinned(func: Any, args: Any, kwargs: Any) -> Any:
    return func(args[0]._local, *args[1:], **kwargs)


# -- lists --------------------------------------------------------------------------------------------------------


def _common_specs(func: Any, args: Any, kwargs: Any) -> tuple[list[ShardSpec | None], list[bool]]:
    """Return for each position of the lists among the arguments what :func:`_common_spec` does; None for plain tensors."""
    lists = [value for value in (*args, *kwargs.values()) if isinstance(value, (list, tuple)) and value]
    specs: list[ShardSpec | None] = [None] * next(map(len, lists), 0)
    mixed = [False] * len(specs)
    for value in lists:
        if len(value) != len(specs):
            raise RuntimeError(f"{func} needs lists of equal length, got {len(specs)} and {len(value)}")
        for i, item in enumerate(value):
            if isinstance(item, ShardTensor):
                known = specs[i]
                mixed[i] = mixed[i] or is_mixed(item)
                if known is None:
                    specs[i] = item._spec
                elif not same_cut(known, item._spec):
                    raise gather_error((args, kwargs), func, "needs both cut alike, and they are not")
    return specs, mixed


def _lists(func: Any, args: Any, kwargs: Any) -> Any:
    """Run one of :data:`FOREACH` or :data:`FUSED`."""
    name = func._opname
    fused, in_place = name.startswith("_fused"), name.endswith("_")
    if fused and not in_place:
        raise gather_error((args, kwargs), func)
    specs, mixed = _common_specs(func, args, kwargs)
    if in_place and any(
        spec is not None and not isinstance(t, ShardTensor) for spec, t in zip(specs, args[0], strict=True)
    ):
        raise gather_error((args, kwargs), func, "cannot be written into a plain tensor from shards")

    def local_item(value: Any, spec: ShardSpec | None) -> Any:
        counter = fused and not isinstance(value, ShardTensor) and value.dim() == 0
        return value if spec is None or counter else _local(value, spec, func)

    def local(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [local_item(v, spec) for v, spec in zip(value, specs, strict=bool(value))]
        if isinstance(value, ShardTensor):
            raise gather_error((args, kwargs), func)
        return value  # a number, or one 0-dim tensor for the whole list

    if in_place and True in mixed:
        overwrites = name in ("_foreach_copy_", "_foreach_zero_")
        for i, t in enumerate(args[0]):
            if mixed[i]:
                lists = [value for value in (*args, *kwargs.values()) if isinstance(value, (list, tuple)) and value]
                _mix(t, func, [value[i] for value in (lists[1:] if overwrites else lists)])
    with changing(args[0] if in_place else (), args[1] if name == "_foreach_copy_" else ()):
        result = func(*map(local, args), **{key: local(value) for key, value in kwargs.items()})
        if in_place:
            for t in args[0]:
                if isinstance(t, ShardTensor):
                    _count_edit(t)
    if in_place or result is None:
        return args[0] if result is not None else None
    wrapped = [t if spec is None else ShardTensor._wrap(t, spec) for t, spec in zip(result, specs, strict=True)]
    for t, differs in zip(wrapped, mixed, strict=True):
        if differs:
            t._shard_state.mixed = True
    return wrapped


_HANDLERS: dict[str, Callable[[Any, Any, Any], Any]] = {
    **dict.fromkeys(_ALIASES, _alias),
    **dict.fromkeys(VIEWS, view),
    **dict.fromkeys(_NEW, _new),
    **dict.fromkeys(RANDOM | _RANDOM_LIKE, _random),
    **dict.fromkeys(FOREACH | FUSED, _lists),
    **REDUCTIONS,
    "is_pinned": _is_pinned,
    "_foreach_norm": foreach_norm,
    "_amp_foreach_non_finite_check_and_unscale": unscale_and_check,
}
