"""``__torch_dispatch__`` of a ShardTensor: an explicit table of the operators that it allows.

Elementwise operators run on the local shards. Reductions to a scalar reduce the local shard and add one small collective
(:mod:`.reductions`). Views are ShardTensors over a part of the same shard (:mod:`.views`). Every other operator raises
:class:`~torch_shard.errors.NeedsGatherError`. torch's operator tags don't tell these apart: ``aten::equal`` is tagged
pointwise, and ``_foreach_norm`` is a ``_foreach_`` operator.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..errors import NeedsGatherError
from .reductions import REDUCTIONS, foreach_norm, unscale_and_check
from .spec import ShardSpec, broadcast_shard, gather_error, same_cut, shard_of_full
from .views import VIEWS, following, view

if TYPE_CHECKING:
    from .tensor import ShardTensor

__all__ = ["ELEMENTWISE", "FOREACH", "FUSED", "RANDOM", "alias", "dispatch", "needs_gather"]

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
# The derivatives of the above, which autograd calls.
_BACKWARD = """
sigmoid_backward tanh_backward threshold_backward gelu_backward silu_backward softplus_backward
leaky_relu_backward elu_backward hardsigmoid_backward hardswish_backward hardtanh_backward
logit_backward mish_backward softshrink_backward hardshrink_backward
"""
# Copies, and operators that read shape, dtype and device only.
_COPIES = "copy fill zero zeros_like ones_like full_like empty_like clone _to_copy _conj resolve_conj resolve_neg"

ELEMENTWISE = frozenset((_UNARY + _BINARY + _BACKWARD + _COPIES).split())
"""Operators (without the ``_`` of their in-place form) that combine elements at one position."""

_FOREACH_BASES = """
add sub mul div pow addcmul addcdiv lerp maximum minimum clamp_min clamp_max copy zero abs acos asin
atan ceil cos cosh erf erfc exp expm1 floor frac lgamma log log10 log1p log2 neg reciprocal round
rsqrt sigmoid sign sin sinh sqrt tan tanh trunc clone
"""
FOREACH = frozenset("_foreach_" + name for name in _FOREACH_BASES.split())
"""Elementwise operators over lists of tensors (without the ``_`` of their in-place form)."""

FUSED = frozenset({"_fused_adam", "_fused_adamw", "_fused_sgd", "_fused_adagrad"})
"""Optimizer steps over lists of tensors; all in place at Python level."""

RANDOM = frozenset({"normal", "uniform", "bernoulli", "exponential", "random", "log_normal", "cauchy", "geometric"})
"""In-place random fills (without the ``_``); :data:`_RANDOM_LIKE` makes new tensors."""

_RANDOM_LIKE = frozenset({"rand_like", "randn_like", "randint_like"})
_ALIASES = frozenset({"detach", "alias", "lift_fresh", "lift", "detach_"})
_NEW = frozenset({"new_empty", "new_zeros", "new_ones", "new_full", "new_empty_strided"})


def dispatch(cls: type[ShardTensor], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one ATen operator that has a ShardTensor among its arguments, or raise."""
    if func.namespace == "aten":
        name = func._opname
        base = name[:-1] if name.endswith("_") and not name.endswith("__") else name
        if base in ELEMENTWISE:
            return _elementwise(cls, func, name, base, args, kwargs)
        handler = _HANDLERS.get(base)
        if handler is not None:
            return handler(cls, func, args, kwargs)
        if torch.is_inference_mode_enabled():
            # In inference mode composite functions (`to`, `view_as`) arrive here undecomposed.
            result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
    raise needs_gather(cls, func, args, kwargs)


def needs_gather(
    cls: type[ShardTensor], func: Any, args: Any, kwargs: Any, why: str = "needs the whole parameter"
) -> NeedsGatherError:
    """Return the error for an operator that can't be computed on local shards."""
    specs = [t._spec for t in _tensors((args, kwargs)) if isinstance(t, cls)]
    return gather_error(specs, str(func), why)


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, (tuple, list)):
        return [t for item in value for t in _tensors(item)]
    if isinstance(value, dict):
        return [t for item in value.values() for t in _tensors(item)]
    return []


def _common_spec(cls: type[ShardTensor], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> ShardSpec:
    spec: ShardSpec | None = None
    for value in (*args, *kwargs.values()) if kwargs else args:
        if isinstance(value, cls):
            own = value._shard_state.spec
            if spec is None:
                spec = own
            elif own is not spec and not same_cut(spec, own):
                raise needs_gather(cls, func, args, kwargs, "needs both cut alike, and they are not")
    if spec is None:
        raise needs_gather(cls, func, args, kwargs)
    return spec


def _elementwise(
    cls: type[ShardTensor], func: Any, name: str, base: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    spec = _common_spec(cls, func, args, kwargs)
    if len(args) == 1 and name == "where":  # where(condition) gives indices
        raise needs_gather(cls, func, args, kwargs)
    target: Any = None
    if name is not base or name.startswith("__i"):
        target = args[0]
    elif "out" in kwargs:
        target = kwargs["out"]
    if target is not None and not isinstance(target, cls):
        raise needs_gather(cls, func, args, kwargs, "cannot be written into a plain tensor from local slices")
    local_args = [_local(cls, value, spec, func) for value in args]
    local_kwargs = {key: _local(cls, value, spec, func) for key, value in kwargs.items()}
    # The shards are 1-D, and the result's strides are those of the parameter, whatever was asked for.
    local_kwargs.pop("memory_format", None)
    result = func(*local_args, **local_kwargs)
    if target is not None:
        _count_edit(target)
        return target
    wrapped = cls._wrap(result, spec)
    if name == "_to_copy":
        wrapped._shard_state.converted = True  # see ShardTensor.__tensor_flatten__
    return wrapped


def _count_edit(target: ShardTensor) -> None:
    """Increment the version of the shard, which tells the engine that the unsharded parameter is out of date.

    Below autograd torch does not increment it, and an alias (`p.data`) has a version counter of its own.
    """
    torch.autograd.graph.increment_version(target._shard_state.local)


def _local(cls: type[ShardTensor], value: Any, spec: ShardSpec, func: Any) -> Any:
    if isinstance(value, cls):
        return value._shard_state.local
    if isinstance(value, torch.Tensor):
        local = broadcast_shard(value, spec, str(func))
        # For type promotion a 0-dim parameter and a 0-dim plain operand are equals. The parameter's shard is 1-D, so the
        # operand is made 1-D, too.
        return local.expand(spec.length) if local.dim() == 0 and not spec.shape else local
    return value


# -- aliases and new tensors --------------------------------------------------------------------------------------


def alias(cls: type[ShardTensor], source: Any) -> ShardTensor:
    """Return another ShardTensor of the same shard; the alias of a parameter may be unsharded, too."""
    result = cls._wrap(source._local, source._spec, source._unit_ref)
    result._shard_state.origin = source._shard_state.origin
    return following(source, result)


def _alias(cls: type[ShardTensor], func: Any, args: Any, kwargs: Any) -> Any:
    source = args[0]
    if func._opname == "detach_":
        return source
    if torch.is_inference_mode_enabled() and not source.is_inference():
        # An alias shares the version counter of an ordinary tensor; inference tensors have none.
        with torch.inference_mode(False):
            return alias(cls, source)
    return alias(cls, source)


def _new(cls: type[ShardTensor], func: Any, args: Any, kwargs: Any) -> Any:
    source, size = args[0], tuple(args[1])
    spec, name = source._spec, func._opname
    options = {key: value for key, value in kwargs.items() if key in ("dtype", "device", "pin_memory")}
    strided = name == "new_empty_strided"
    same_shape = size == tuple(spec.shape) and (not strided or tuple(args[2]) == spec.stride)
    if same_shape and strided:
        return cls._wrap(source._local.new_empty(spec.length, **options), spec)
    shape = (spec.length,) if same_shape else size
    result = func(source._local, shape, *args[2:], **options)
    return cls._wrap(result, spec) if same_shape else result


def _random(cls: type[ShardTensor], func: Any, args: Any, kwargs: Any) -> Any:
    target = args[0]
    if not isinstance(target, cls):
        raise needs_gather(cls, func, args, kwargs, "cannot be written into a plain tensor from local slices")
    if not func._opname.endswith("_") or (len(args) > 1 and isinstance(args[1], cls)):
        raise needs_gather(cls, func, args, kwargs)  # torch.bernoulli(probabilities), bernoulli_(probabilities)
    # Each rank draws the full parameter. So a seed gives the values of plain torch, and the ranks' generators stay in step.
    local, spec = target._local, target._spec
    full = torch.empty_strided(spec.shape, spec.stride, dtype=local.dtype, device=local.device)
    func(full, *args[1:], **kwargs)
    local.copy_(shard_of_full(full, spec))
    _count_edit(target)
    return target


def _random_like(cls: type[ShardTensor], func: Any, args: Any, kwargs: Any) -> Any:
    source = args[0]
    local, spec = source._local, source._spec
    full = torch.empty_strided(spec.shape, spec.stride, dtype=local.dtype, device=local.device)
    drawn = func(full, *args[1:], **kwargs)
    return cls._wrap(shard_of_full(drawn, spec).clone(), spec)


def _pinned(cls: type[ShardTensor], func: Any, args: Any, kwargs: Any) -> Any:
    result = func(args[0]._local, *args[1:], **kwargs)
    return cls._wrap(result, args[0]._spec) if isinstance(result, torch.Tensor) else result


# -- lists --------------------------------------------------------------------------------------------------------


def _list_specs(cls: type[ShardTensor], func: Any, args: Any, kwargs: Any) -> list[ShardSpec | None]:
    specs: list[ShardSpec | None] = [None] * len(args[0])
    for value in (*args, *kwargs.values()):
        if not isinstance(value, (list, tuple)):
            continue
        if len(value) != len(specs):
            raise RuntimeError(f"{func} needs lists of equal length, got {len(specs)} and {len(value)}")
        for i, item in enumerate(value):
            if isinstance(item, cls):
                known = specs[i]
                if known is None:
                    specs[i] = item._spec
                elif not same_cut(known, item._spec):
                    raise needs_gather(cls, func, args, kwargs, "needs both cut alike, and they are not")
    return specs


def _foreach(cls: type[ShardTensor], func: Any, args: Any, kwargs: Any) -> Any:
    specs = _list_specs(cls, func, args, kwargs)
    in_place = func._opname.endswith("_")
    if in_place and any(spec is not None and not isinstance(t, cls) for spec, t in zip(specs, args[0], strict=True)):
        raise needs_gather(cls, func, args, kwargs, "cannot be written into a plain tensor from local slices")

    def local(value: Any) -> Any:
        if isinstance(value, (list, tuple)):
            return [v if spec is None else _local(cls, v, spec, func) for v, spec in zip(value, specs, strict=True)]
        if isinstance(value, cls):
            raise needs_gather(cls, func, args, kwargs)
        return value  # a number, or one 0-dim tensor for the whole list

    result = func(*map(local, args), **{key: local(value) for key, value in kwargs.items()})
    if in_place:
        for t in args[0]:
            if isinstance(t, cls):
                _count_edit(t)
    if in_place or result is None:
        return args[0] if result is not None else None
    return [t if spec is None else cls._wrap(t, spec) for t, spec in zip(result, specs, strict=True)]


def _fused(cls: type[ShardTensor], func: Any, args: Any, kwargs: Any) -> Any:
    # state_steps, lr, grad_scale and found_inf are 0-dim and stay as they are. All other tensors must be cut like their
    # parameter.
    if not func._opname.endswith("_"):
        raise needs_gather(cls, func, args, kwargs)
    specs: list[ShardSpec | None] = [t._spec if isinstance(t, cls) else None for t in args[0]]

    def local(value: Any) -> Any:
        if not isinstance(value, (list, tuple)) or not value or not isinstance(value[0], torch.Tensor):
            return value
        out = []
        for t, spec in zip(value, specs, strict=True):
            if not isinstance(t, cls):
                if spec is not None and t.dim() > 0:
                    raise needs_gather(cls, func, args, kwargs, "needs gradients and state cut like the parameter")
                out.append(t)
            elif spec is None or not same_cut(spec, t._spec):
                raise needs_gather(cls, func, args, kwargs, "needs gradients and state cut like the parameter")
            else:
                out.append(t._local)
        return out

    result = func(*map(local, args), **{key: local(value) for key, value in kwargs.items()})
    for t in args[0]:
        if isinstance(t, cls):
            _count_edit(t)
    return result


_Handler = Callable[[Any, Any, Any, Any], Any]
_HANDLERS: dict[str, _Handler] = {
    **dict.fromkeys(_ALIASES, _alias),
    **dict.fromkeys(VIEWS, view),
    **dict.fromkeys(_NEW, _new),
    **dict.fromkeys(RANDOM, _random),
    **dict.fromkeys(_RANDOM_LIKE, _random_like),
    **dict.fromkeys(FOREACH, _foreach),
    **dict.fromkeys(FUSED, _fused),
    **REDUCTIONS,
    "detach": _alias,
    "is_pinned": _pinned,
    "_pin_memory": _pinned,
    "_foreach_norm": foreach_norm,
    "_amp_foreach_non_finite_check_and_unscale": unscale_and_check,
}
