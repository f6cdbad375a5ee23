"""What ``__torch_function__`` of a ShardTensor does: the level at which whole functions are seen.

- Assignments to ``.data`` and ``.grad`` and registrations of hooks are intercepted.
- *On demand*: the parameter's unit is asked, function by function, whether the gathered parameter
  shall take the ShardTensor's place; it is told whether local arithmetic would do.
- Operations on slices cannot give a plain tensor its gradient: they raise.

Below this level is :mod:`.shard_ops`, which has the last word on what slices can do.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from .errors import NeedsGatherError
from .leaf import own_grad, set_own_grad
from .shard_autograd import (
    NORMS,
    Whole,
    autograd_grad,
    differentiable_sum,
    function_needs_gather,
    reduces_to_scalar,
    shared_gradient,
)
from .shard_ops import ELEMENTWISE, FOREACH, FUSED, RANDOM
from .shard_spec import same_cut, slice_full

if TYPE_CHECKING:
    from .shard_tensor import ShardTensor

__all__ = ["GETTERS", "call", "is_local"]


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_T: Any = torch.Tensor
_NoTorchFunction = torch._C.DisableTorchFunctionSubclass


def _property(name: str) -> Any:
    return getattr(_T, name).__get__


_PROPERTIES = """
shape dtype device requires_grad ndim is_leaf layout grad_fn is_cuda is_cpu is_meta is_sparse is_quantized is_mkldnn
is_nested is_sparse_csr is_mps is_xpu output_nr retains_grad names itemsize nbytes _version name is_vulkan is_xla
_backward_hooks _post_accumulate_grad_hooks
"""
_METHODS = """
size dim ndimension numel nelement stride element_size storage_offset is_floating_point is_complex is_signed
is_contiguous is_inference is_conj is_neg get_device __len__ __hash__ dim_order _is_view has_names is_same_size
"""
GETTERS = frozenset(
    [_property(n) for n in _PROPERTIES.split() if hasattr(_T, n) and hasattr(getattr(_T, n), "__get__")]
    + [getattr(_T, n) for n in _METHODS.split() if hasattr(_T, n)]
    + [torch.is_floating_point, torch.is_complex, torch.numel, torch.is_same_size]
)
"""Functions that read metadata: equal for the slice and the whole, so nothing is substituted."""

# Never substituted, also where compute runs on the gathered parameter: an alias must keep the right to be gathered
# itself (`F.linear(x, w.detach())`), flags belong to the user's object, `new_tensor` reads no element.
_OWN = _names(
    "__set__:requires_grad detach detach_ requires_grad_ retain_grad backward new_tensor is_pinned __repr__ __reduce_ex__"
)

_CONVERSIONS = _names(
    "to type type_as half float double bfloat16 int long short bool byte char cfloat cdouble cpu cuda xpu contiguous "
    "conj pin_memory"
)
_NEW = _names("new_empty new_zeros new_ones new_full new_empty_strided rand_like randn_like randint_like")
_INIT = _names(
    "uniform_ normal_ trunc_normal_ constant_ ones_ zeros_ kaiming_uniform_ kaiming_normal_ xavier_uniform_ "
    "xavier_normal_ _no_grad_normal_ _no_grad_uniform_ _no_grad_fill_ _no_grad_zero_ _no_grad_trunc_normal_"
)
_SCALAR = _names("item __float__ __int__ __bool__ __index__ __complex__ __format__ __contains__")
_DUNDER = _names(
    "__add__ __radd__ __iadd__ __sub__ __rsub__ __isub__ __mul__ __rmul__ __imul__ __div__ __rdiv__ __idiv__ "
    "__truediv__ __rtruediv__ __itruediv__ __floordiv__ __rfloordiv__ __ifloordiv__ __mod__ __rmod__ __imod__ "
    "__pow__ __rpow__ __ipow__ __neg__ __pos__ __abs__ __invert__ __eq__ __ne__ __lt__ __le__ __gt__ __ge__ __and__ "
    "__rand__ __iand__ __or__ __ror__ __ior__ __xor__ __rxor__ __ixor__ __lshift__ __rlshift__ __ilshift__ "
    "__rshift__ __rrshift__ __irshift__"
)
_ARITHMETIC = frozenset(
    ELEMENTWISE | {name + "_" for name in ELEMENTWISE} | _DUNDER | {"expand_as", "view_as", "true_divide"}
)
_LISTS = frozenset(FOREACH | FUSED | {n + "_" for n in FOREACH | FUSED}) | {
    "_foreach_norm",
    "_amp_foreach_non_finite_check_and_unscale_",
}
_DIMS_SECOND = _names("sum mean std var amax amin any all count_nonzero")
_EXTREMES = frozenset({"max", "min"})
_COMPARISONS = frozenset({"equal", "allclose"})

# They would hand out the slice's memory, or none, as if it were the parameter's.
_DENIED = _names(
    "numpy tolist data_ptr untyped_storage storage _typed_storage __array__ __dlpack__ share_memory_ set_ resize_ "
    "resize_as_ apply_ map_ map2_ __cuda_array_interface__ _make_subclass"
)


def call(cls: type[ShardTensor], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Run one torch function that has a ShardTensor among its arguments."""
    special = _SPECIAL.get(func)
    if special is not None:
        return special(cls, func, args, kwargs)
    name = _name(func)
    if name in _OWN:
        with _NoTorchFunction():
            return func(*args, **kwargs)
    tensors: list[Any] = []
    _collect(args, tensors)
    if kwargs:
        _collect(kwargs.values(), tensors)
    for t in tensors:
        if type(t) is cls and t._unit_ref is not None and t._unit_ref() is not None:
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
    """Run on the slices."""
    if name in _DENIED or name.removeprefix("__get__:") in _DENIED:
        raise function_needs_gather(cls, name, tensors)
    derived = torch.is_grad_enabled() and any(type(t) is cls and _is_derived(t) for t in tensors)
    if derived and not is_local(cls, name, args, kwargs, tensors):
        return _on_wholes(cls, func, args, kwargs, tensors)
    with _NoTorchFunction():
        if torch.is_grad_enabled() and len(tensors) > 1:
            for t in tensors:
                if type(t) is not cls and t.requires_grad:
                    raise function_needs_gather(
                        cls, name, tensors, "with a plain tensor that requires a gradient needs the whole parameter"
                    )
        if (name == "sum" or name == "mean") and tensors and tensors[0].requires_grad and torch.is_grad_enabled():
            return shared_gradient(differentiable_sum(cls, func, name, args, kwargs, tensors), tensors[0])
        if name in _SCALARS and torch.is_grad_enabled() and len(tensors) == 1 and tensors[0].requires_grad:
            return shared_gradient(func(*args, **kwargs), tensors[0])
        if name == "__setitem__" and _is_masked_fill(cls, args):
            target, mask, value = args
            return target.masked_fill_(mask, value.to(target.dtype) if isinstance(value, torch.Tensor) else value)
        return func(*args, **kwargs)


_SCALARS = NORMS | _EXTREMES | _DIMS_SECOND


def _is_derived(t: Any) -> bool:
    """Computed from parameters, with a gradient: ``p * mask``, or a meta-learner's ``p - lr * grad``."""
    with _NoTorchFunction():
        return t.grad_fn is not None


def _on_wholes(
    cls: type[ShardTensor], func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Any]
) -> Any:
    """Run on the gathered forms of what was computed from parameters, as for the parameters themselves. Collective."""
    with _NoTorchFunction():
        wholes = {id(t): Whole.apply(t) for t in tensors if type(t) is cls and t.grad_fn is not None}
    args = tuple(_substitute(value, wholes) for value in args)
    return func(*args, **{key: _substitute(value, wholes) for key, value in kwargs.items()})


# -- local arithmetic or not --------------------------------------------------------------------------------------


def is_local(cls: type[ShardTensor], name: str, args: Any, kwargs: Any, tensors: list[Any]) -> bool:
    """Return whether slices are enough for a function, by its name and its operands' shapes.

    Local are: elementwise arithmetic whose result has the ShardTensors' own shape, copies, fills,
    new tensors, conversions, lists of these, and reductions to a scalar.
    """
    if name in _LISTS or name in _NEW or name in _CONVERSIONS or name in _INIT or name in _SCALAR:
        return True
    if name in _EXTREMES:
        if len(tensors) == 1:
            return len(args) == 1 and not kwargs
        return _fits(cls, name, args, kwargs, tensors)
    if name in _DIMS_SECOND or name in NORMS:
        return reduces_to_scalar(cls, name, args, kwargs, tensors)
    if name in _COMPARISONS:
        return True
    if name in _ARITHMETIC or name in RANDOM or (name.endswith("_") and name[:-1] in RANDOM):
        return _fits(cls, name, args, kwargs, tensors)
    if name == "__setitem__":
        return _is_masked_fill(cls, args)
    return False


def _is_masked_fill(cls: type[ShardTensor], args: Any) -> bool:
    """``t[mask] = value`` with a mask of the whole shape and one value."""
    target, mask, value = args
    return (
        type(target) is cls
        and isinstance(mask, torch.Tensor)
        and mask.dtype == torch.bool
        and mask.shape == target._spec.shape
        and (not isinstance(value, torch.Tensor) or (value.dim() == 0 and type(value) is not cls))
    )


def _fits(cls: type[ShardTensor], name: str, args: Any, kwargs: Any, tensors: list[Any]) -> bool:
    spec = None
    for t in tensors:
        if type(t) is cls:
            if spec is not None and not same_cut(spec, t._spec):
                return False
            spec = t._spec
    assert spec is not None
    if name == "where" and len(tensors) + sum(not isinstance(a, torch.Tensor) for a in args) < 3 and not kwargs:
        return False  # where(condition) gives indices
    written = "out" in kwargs or (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")
    if written and type(kwargs.get("out", args[0] if args else None)) is not cls and name != "__invert__":
        return False
    gradients = torch.is_grad_enabled()
    for t in tensors:
        if type(t) is cls:
            continue
        if gradients and t.requires_grad:
            return False  # its gradient would have to be collected from all ranks
        if t.dim() and t.shape != spec.shape:
            try:
                if torch.broadcast_shapes(spec.shape, t.shape) != spec.shape:
                    return False
            except RuntimeError:
                return True  # plain torch rejects it: so will the local operation, without a gather
    return True


# -- on demand ----------------------------------------------------------------------------------------------------


def _on_demand(
    cls: type[ShardTensor], func: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[Any]
) -> Any:
    """Ask each parameter's unit whether the gathered parameter shall take its place, and run."""
    leaves: dict[int, Any] = {}
    originals: list[Any] = []
    asked: list[Any] = []
    local_ok: bool | None = None
    result: Any = None
    copies: list[torch.Tensor] = []
    try:
        for t in tensors:
            if type(t) is not cls or id(t) in leaves or t._unit_ref is None:
                continue
            unit = t._unit_ref()
            if unit is None:
                continue
            if local_ok is None:
                local_ok = is_local(cls, name, args, kwargs, tensors) and not _may_differ(cls, name, tensors)
            leaf = unit.on_demand(t, func, local_ok)
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
        args = tuple(_substitute(value, leaves) for value in args)
        kwargs = {key: _substitute(value, leaves) for key, value in kwargs.items()}
        result = func(*args, **kwargs)
        # An in-place function returns its operand: `module.weight += 1` must not register the leaf.
        for t in originals:
            if result is leaves[id(t)]:
                result = t
        if asked and not any(unit.is_summoned for unit in asked):
            result = _own_memory(result, [leaves[id(t)] for t in originals], copies)
        return result
    finally:
        for unit in reversed(asked):
            unit.on_demand_done(result, copies, " and ".join(t._spec.name for t in originals))


def _may_differ(cls: type[ShardTensor], name: str, tensors: list[Any]) -> bool:
    """Whether a parameter meets something each rank may have its own of (a mask, random numbers), so that the ranks'
    gradients have to be averaged."""
    if not torch.is_grad_enabled():
        return False
    with _NoTorchFunction():
        trains = any(type(t) is cls and t.requires_grad for t in tensors)
    return trains and (name in RANDOM or any(type(t) is not cls for t in tensors))


def _own_memory(result: Any, leaves: list[Any], copies: list[torch.Tensor]) -> Any:
    """A view of a gathered parameter (`weight.t()`, `weight[:n]`) outlives its memory, which goes with the next unit's
    forward: copy it, into `copies` as well. The copy carries the gradient back as the view would."""
    if isinstance(result, (tuple, list)) and result and all(isinstance(r, torch.Tensor) for r in result):
        items = [_own_memory(r, leaves, copies) for r in result]
        return type(result)(items) if type(result) in (tuple, list) else result
    if type(result) is torch.Tensor and result.numel() and result.layout is torch.strided:
        storage = result.untyped_storage()._cdata
        if any(leaf.untyped_storage()._cdata == storage for leaf in leaves):
            copies.append(result.clone())
            return copies[-1]
    return result


def _substitute(value: Any, leaves: dict[int, Any]) -> Any:
    if isinstance(value, torch.Tensor):
        return leaves.get(id(value), value)
    if isinstance(value, (tuple, list)):
        items = [_substitute(item, leaves) for item in value]
        if isinstance(value, tuple):
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        return items
    return value


def _summoned_leaf(t: Any) -> Any:
    """The whole parameter, where ``engine.gathered`` holds it, else None."""
    unit = t._unit_ref() if t._unit_ref is not None else None
    if unit is not None and unit.is_summoned:
        return unit.leaf_of(t)
    return None


# -- attributes and hooks -----------------------------------------------------------------------------------------


def get_grad(param: ShardTensor) -> Any:
    """``param.grad``."""
    leaf = _summoned_leaf(param)
    if leaf is not None and leaf.grad is not None:
        return leaf.grad
    with _NoTorchFunction():
        grad = own_grad(param)
        cls = type(param)
        if grad is not None and type(grad) is not cls:
            # A derivative that autograd made as a plain expanded scalar.
            grad = cls.from_full(grad, param._spec)
            set_own_grad(param, grad)
    return grad


def set_grad(param: ShardTensor, value: Any) -> None:
    """``param.grad = value``."""
    leaf = _summoned_leaf(param)
    if leaf is not None and leaf.grad is not None:
        leaf.grad = value
        if value is not None:
            return
    with _NoTorchFunction():
        set_own_grad(param, _as_grad(type(param), param, value) if isinstance(value, torch.Tensor) else value)


def _get_grad(cls: type[ShardTensor], func: Any, args: Any, kwargs: Any) -> Any:
    return get_grad(args[0])


def _set_grad(cls: type[ShardTensor], func: Any, args: Any, kwargs: Any) -> None:
    param, value = args
    if type(param) is cls:
        set_grad(param, value)
    elif type(value) is cls:
        raise function_needs_gather(cls, ".grad of a plain tensor, assigned", [value])
    else:
        func(param, value)


def _del_grad(cls: type[ShardTensor], func: Any, args: Any, kwargs: Any) -> None:
    set_grad(args[0], None)


def _get_data(cls: type[ShardTensor], func: Any, args: Any, kwargs: Any) -> Any:
    leaf = _summoned_leaf(args[0])
    if leaf is not None:
        return leaf.data
    source = args[0]
    return cls._wrap(source._local, source._spec, source._unit_ref)


def _set_data(cls: type[ShardTensor], func: Any, args: Any, kwargs: Any) -> None:
    target, value = args
    if type(target) is not cls:
        raise function_needs_gather(cls, ".data of a plain tensor, assigned", [value])
    leaf = _summoned_leaf(target)
    if leaf is not None and isinstance(value, torch.Tensor) and type(value) is not cls:
        if value.shape == leaf.shape and value.dtype == leaf.dtype and value.device == leaf.device:
            leaf.data.copy_(value)
            return
    elif leaf is not None and value is target:
        return
    _assign_data(cls, target, value)


def _may_assign_data(cls: type[ShardTensor], func: Any, args: Any, kwargs: Any) -> bool:
    """Asked by Module.to() and its like: yes, so that it assigns to `.data`, which knows what fits, instead of putting
    another parameter into the module; nor shall it swap the new tensor in."""
    if type(args[1]) is cls:
        args[1]._converted = True
    return True


def _assign_data(cls: type[ShardTensor], param: ShardTensor, value: Any) -> None:
    """``param.data = value``: copy a whole plain tensor's slice, or an equally cut ShardTensor, into the slice.

    Raises:
        NeedsGatherError: another shape, dtype, device or cut. Not collective.
    """
    spec, local = param._spec, param._local
    problem = ""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"Variable data has to be a tensor, but got {type(value).__name__}")
    if value.dtype != local.dtype or value.device != local.device:
        problem = f"{value.dtype} on {value.device} in place of {local.dtype} on {local.device}"
    elif value.shape != spec.shape:
        problem = f"shape {tuple(value.shape)} in place of {tuple(spec.shape)}"
    elif type(value) is cls and not same_cut(spec, value._spec):
        problem = "a tensor cut differently between the ranks"
    if problem:
        raise NeedsGatherError(
            f"rank {spec.rank}: .data of the sharded {spec.name} was assigned (by Module.to(), half() or float(), perhaps) "
            f"{problem}. Assign the whole tensor with shape, dtype and device unchanged; convert a model "
            "before shard(), or engine.close() it, convert, and shard again."
        )
    with torch.no_grad():
        new = value._local if type(value) is cls else slice_full(value.detach(), spec)
        if new.data_ptr() != local.data_ptr() or new is not local:
            local.copy_(new)


def _as_grad(cls: type[ShardTensor], param: ShardTensor, value: Any) -> ShardTensor:
    """Return what ``param.grad = value`` stores: a ShardTensor cut like `param`.

    Raises:
        NeedsGatherError: another shape or cut. Not collective.
    """
    spec = param._spec
    if type(value) is cls:
        if same_cut(spec, value._spec):
            return value
        problem = "a tensor cut differently between the ranks"
    elif value.shape == spec.shape:
        return cls.from_full(value, spec)
    else:
        problem = f"shape {tuple(value.shape)} in place of {tuple(spec.shape)}"
    raise NeedsGatherError(
        f"rank {spec.rank}: assignment to .grad of the sharded {spec.name}: {problem}. Assign None, a whole plain "
        "tensor, or a gradient of this very parameter."
    )


def _register_hook(cls: type[ShardTensor], func: Any, args: Any, kwargs: Any) -> Any:
    param = args[0]
    unit = param._unit_ref() if param._unit_ref is not None else None
    hook = args[1] if len(args) > 1 else kwargs["hook"]
    with _NoTorchFunction():
        if unit is None or not param.requires_grad:
            return func(param, hook)
        if func is not _T.register_hook:
            return unit.register_post_accumulate_hook(param, hook)
        # Compute gives its gradient to the leaf, local arithmetic (an L2 term in the loss) to the ShardTensor.
        return _Handles([unit.register_grad_hook(param, hook), func(param, hook)])


class _Handles:
    """Several removable handles as one."""

    def __init__(self, handles: list[Any]) -> None:
        self.handles = handles

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()

    def __enter__(self) -> _Handles:
        return self

    def __exit__(self, *_: Any) -> None:
        self.remove()


_SPECIAL: dict[Any, Callable[[Any, Any, Any, Any], Any]] = {
    _T.grad.__get__: _get_grad,
    _T.grad.__set__: _set_grad,
    _T.grad.__delete__: _del_grad,
    _T.data.__get__: _get_data,
    _T.data.__set__: _set_data,
    _T.register_hook: _register_hook,
    _T.register_post_accumulate_grad_hook: _register_hook,
    torch.autograd.grad: autograd_grad,
    torch._has_compatible_shallow_copy_type: _may_assign_data,  # type: ignore[attr-defined]
}
