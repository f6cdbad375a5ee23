"""The attributes of a ShardTensor that users may assign, and its hooks: ``.grad``, ``.data``, ``register_hook``."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..errors import NeedsGatherError
from .autograd import function_needs_gather
from .dispatch import alias
from .spec import same_cut, shard_of_full
from .unsharded_param import own_grad, set_own_grad

if TYPE_CHECKING:
    from .tensor import ShardTensor

__all__ = ["HANDLERS", "get_grad", "set_grad"]

_T: Any = torch.Tensor
_NoTorchFunction = torch._C.DisableTorchFunctionSubclass


def _summoned_leaf(t: Any) -> Any:
    """Return the unsharded parameter inside ``engine.gathered``; None outside."""
    unit_ref = t._shard_state.unit_ref
    unit = unit_ref() if unit_ref is not None else None
    if unit is not None and unit.is_summoned:
        return unit.unsharded_param_of(t)
    return None


def get_grad(param: ShardTensor) -> Any:
    """Return ``param.grad``."""
    leaf = _summoned_leaf(param)
    if leaf is not None and leaf.grad is not None:
        return leaf.grad
    with _NoTorchFunction():
        grad = own_grad(param)
        cls = param._shard_class
        if grad is not None and not isinstance(grad, cls):
            # Autograd has made this derivative as a plain expanded scalar.
            grad = cls.from_full(grad, param._spec)
            set_own_grad(param, grad)
    if grad is None and param._unit_ref is not None:
        unit = param._unit_ref()
        if unit is not None:
            unit.check_grad_reader()
    return grad


def set_grad(param: ShardTensor, value: Any) -> None:
    """Carry out ``param.grad = value``."""
    leaf = _summoned_leaf(param)
    if leaf is not None and leaf.grad is not None:
        leaf.grad = value
        if value is not None:
            return
    with _NoTorchFunction():
        set_own_grad(param, _as_grad(param._shard_class, param, value) if isinstance(value, torch.Tensor) else value)


def _get_grad(cls: type[ShardTensor], func: Any, args: Any, kwargs: Any) -> Any:
    return get_grad(args[0])


def _set_grad(cls: type[ShardTensor], func: Any, args: Any, kwargs: Any) -> None:
    param, value = args
    if isinstance(param, cls):
        set_grad(param, value)
    elif isinstance(value, cls):
        raise function_needs_gather(cls, ".grad of a plain tensor, assigned", [value])
    else:
        func(param, value)


def _del_grad(cls: type[ShardTensor], func: Any, args: Any, kwargs: Any) -> None:
    set_grad(args[0], None)


def _get_data(cls: type[ShardTensor], func: Any, args: Any, kwargs: Any) -> Any:
    leaf = _summoned_leaf(args[0])
    if leaf is not None:
        return leaf.data
    return alias(cls, args[0])


def _set_data(cls: type[ShardTensor], func: Any, args: Any, kwargs: Any) -> None:
    target, value = args
    if not isinstance(target, cls):
        raise function_needs_gather(cls, ".data of a plain tensor, assigned", [value])
    leaf = _summoned_leaf(target)
    if leaf is not None and isinstance(value, torch.Tensor) and not isinstance(value, cls):
        if value.shape == leaf.shape and value.dtype == leaf.dtype and value.device == leaf.device:
            leaf.data.copy_(value)
            return
    elif leaf is not None and value is target:
        return
    _assign_data(cls, target, value)


def _may_assign_data(cls: type[ShardTensor], func: Any, args: Any, kwargs: Any) -> bool:
    """Return True, so that Module.to() and its like assign to `.data`, which checks the value.

    Otherwise they would put another parameter into the module. The note on the converted tensor keeps them from swapping
    that in, see ``ShardTensor.__tensor_flatten__``.
    """
    if isinstance(args[1], cls) and args[1] is not args[0]:
        args[1]._shard_state.converted = True
    return True


def _assign_data(cls: type[ShardTensor], param: ShardTensor, value: Any) -> None:
    """Carry out ``param.data = value``: copy the shard of a full plain tensor, or of an equally cut ShardTensor.

    Not collective.

    Raises:
        NeedsGatherError: `value` has another shape, dtype, device or cut.
    """
    spec, local = param._spec, param._local
    problem = ""
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"Variable data has to be a tensor, but got {type(value).__name__}")
    if value.dtype != local.dtype or value.device != local.device:
        problem = f"{value.dtype} on {value.device} in place of {local.dtype} on {local.device}"
    elif value.shape != spec.shape:
        problem = f"shape {tuple(value.shape)} in place of {tuple(spec.shape)}"
    elif isinstance(value, cls) and not same_cut(spec, value._spec):
        problem = "a tensor cut differently between the ranks"
    if problem:
        raise NeedsGatherError(
            f"rank {spec.world_rank}: .data of the sharded {spec.name} was assigned (by Module.to(), half() or float(), perhaps) "
            f"{problem}. Assign the whole tensor with shape, dtype and device unchanged; convert a model "
            "before shard(), or engine.close() it, convert, and shard again."
        )
    with torch.no_grad():
        new = value._local if isinstance(value, cls) else shard_of_full(value.detach(), spec)
        if new.data_ptr() != local.data_ptr() or new is not local:
            local.copy_(new)


def _as_grad(cls: type[ShardTensor], param: ShardTensor, value: Any) -> ShardTensor:
    """Return what ``param.grad = value`` stores: a ShardTensor cut like `param`. Not collective.

    Raises:
        NeedsGatherError: `value` has another shape or cut.
    """
    spec = param._spec
    if isinstance(value, cls):
        if same_cut(spec, value._spec):
            return value
        problem = "a tensor cut differently between the ranks"
    elif value.shape == spec.shape:
        with _NoTorchFunction():
            device = param.device
        return cls._wrap(shard_of_full(value.detach(), spec).to(device, copy=True), spec)
    else:
        problem = f"shape {tuple(value.shape)} in place of {tuple(spec.shape)}"
    raise NeedsGatherError(
        f"rank {spec.world_rank}: assignment to .grad of the sharded {spec.name}: {problem}. Assign None, a whole plain "
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
        # Modules' computation gives its gradient to the unsharded parameter, arithmetic on shards (an L2 term in the loss)
        # to the ShardTensor.
        return _Handles([unit.register_grad_hook(param, hook), func(param, hook)])


class _Handles:
    """Several removable handles that are removed together."""

    def __init__(self, handles: list[Any]) -> None:
        self.handles = handles

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()

    def __enter__(self) -> _Handles:
        return self

    def __exit__(self, *_: Any) -> None:
        self.remove()


HANDLERS: dict[Any, Callable[[Any, Any, Any, Any], Any]] = {
    _T.grad.__get__: _get_grad,
    _T.grad.__set__: _set_grad,
    _T.grad.__delete__: _del_grad,
    _T.data.__get__: _get_data,
    _T.data.__set__: _set_data,
    _T.register_hook: _register_hook,
    _T.register_post_accumulate_grad_hook: _register_hook,
    torch._has_compatible_shallow_copy_type: _may_assign_data,  # type: ignore[attr-defined]
}
"""By torch function, what runs in its place, called with ``(ShardTensor, function, args, kwargs)``."""
