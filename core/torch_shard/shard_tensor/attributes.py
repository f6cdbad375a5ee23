"""The attributes of a ShardTensor that users may assign, and its hooks: ``.grad``, ``.data``, ``register_hook``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..errors import NeedsGatherError
from ..layout.dtensor_placement import is_dtensor
from .aliases import assign_to_alias, is_alias, leave_values, put_back
from .autograd import is_of_this_rank, mean_over_ranks
from .changes import changing, has_values_of, same_bits
from .dispatch import alias
from .spec import refuse_unreduced, same_cut, shard_of_full
from .tensor import ShardTensor

_T: Any = torch.Tensor
_NoTorchFunction = torch._C.DisableTorchFunctionSubclass


def _summoned_param(t: Any) -> Any:
    """Return the unsharded parameter inside ``engine.gathered``; None outside."""
    ref = t._shard_state.unit_ref  # hot: no call of a property
    unit = None if ref is None else ref()
    return unit.unsharded_param_of(t) if unit is not None and unit.is_summoned else None


def gradient_holder(unit: Any, param: Any) -> Any:
    """Return the unsharded parameter if that has the gradient, inside ``engine.gathered``; else None.

    If it is None, `.grad` is this rank's shard of the gradient, once the ranks have agreed on which gradients exist.
    """
    if is_alias(param):
        return None
    if unit.is_summoned and (unsharded := unit.unsharded_param_of(param)).grad is not None:
        return unsharded
    if unit.runtime.awaits_votes:
        unit.runtime.await_votes()
    return None


def as_gradient(value: Any, param: ShardTensor) -> Any:
    """Return the gradient that ``param.grad = value`` assigns: a copy of this rank's shard if `value` is a full plain tensor.

    A result of ``torch.autograd.grad``, which each rank has for its own loss, is averaged over the ranks, as backward would do,
    and only for such a value is the call collective. (DDP keeps each rank's own, so that the ranks' parameters come apart.)

    Call it with ``__torch_function__`` disabled.

    Raises:
        NeedsGatherError: `value` has another shape or cut.
    """
    if not isinstance(value, torch.Tensor):
        return value  # autograd says what is wrong with it
    spec = param._spec
    problem = _misfit(param, value)
    if problem:
        raise NeedsGatherError(
            f"rank {spec.world_rank}: assignment to .grad of the sharded {spec.name}: {problem}. Assign None, a full "
            "plain tensor, or a gradient of this very parameter."
        )
    if isinstance(value, ShardTensor):
        return value
    if is_of_this_rank(value) and param._unit is not None:
        value = mean_over_ranks(value, spec, param._unit.collectives.data_parallel)  # of all replicas
    return ShardTensor._wrap(shard_of_full(value.detach(), spec).to(param.device, copy=True), spec)


def get_data(param: ShardTensor) -> Any:
    """Return ``param.data``: another ShardTensor of the same shard."""
    unsharded = _summoned_param(param)
    return alias(param) if unsharded is None else unsharded.data


def set_data(param: ShardTensor, value: Any) -> None:
    """Carry out ``param.data = value``: copy the shard of a full plain tensor, or of an equally cut ShardTensor.

    Not collective, except for a ShardTensor inside ``engine.gathered``, of which the unsharded parameter needs all.

    Raises:
        NeedsGatherError: `value` has another shape, dtype, device or cut, or is sharded inside ``engine.gathered(ranks=...)``.
    """
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"Variable data has to be a tensor, but got {type(value).__name__}")
    unsharded = None if is_alias(param) else _summoned_param(param)
    if unsharded is not None and value is param:
        return
    if unsharded is not None and not isinstance(value, ShardTensor) and _alike(value, unsharded):
        leave_values(param, _plain(unsharded))
        unsharded.data = value
        return
    spec, local = param._spec, param._local
    if not isinstance(value, ShardTensor) and _alike(value, param):  # inside a forward it shows what computes
        value = value.to(local.device, local.dtype)
    given = value._local if isinstance(value, ShardTensor) else value
    problem = _misfit(param, value)
    if given.dtype != local.dtype or given.device != local.device:
        problem = f"{given.dtype} on {given.device} in place of {local.dtype} on {local.device}"
    if problem:
        raise NeedsGatherError(
            f"rank {spec.world_rank}: .data of the sharded {spec.name} was assigned (by Module.to(), half() or float(), perhaps) "
            f"{problem}. Assign the full tensor with shape, dtype and device unchanged; convert a model "
            "before shard(), or engine.close() it, convert, and shard again."
        )
    refuse_unreduced(value, ".data = ")
    with torch.no_grad():
        if unsharded is not None:  # the shard gets its values at the end of ``gathered``
            if isinstance(value, ShardTensor) and param._unit.runtime.solo:  # type: ignore[union-attr]
                raise NeedsGatherError(
                    f"rank {spec.world_rank}: .data of {spec.name} was assigned a sharded tensor inside gathered(ranks=...), "
                    "where each rank goes alone and has a part of it only. Assign value.full_tensor(), computed before."
                )
            full = torch.empty_like(unsharded.data).copy_(value)
            leave_values(param, _plain(unsharded))
            unsharded.data = full
            return
        new = value._local if isinstance(value, ShardTensor) else shard_of_full(value.detach(), spec)
        if new is local:
            return
        if is_alias(param):
            assign_to_alias(param, value, new)
            return
        leave_values(param)
        _copy(param, value, new)
        put_back(param, value)


def _copy(param: ShardTensor, value: Any, new: torch.Tensor) -> None:
    """Copy `new`, this rank's shard of `value`, to the shard of `param`."""
    local = param._local
    if not has_values_of(value, param):
        change = changing([param], [value])
    elif same_bits(new, local):
        return  # what Module.to() has copied unchanged is no edit: one rank alone may call it
    else:
        # The parameter was edited without a trace, in a forward's `.data` or in `to_local()`. Undoing that is not counted
        # either, since the edit may show on some ranks only.
        change = param._unit.runtime.versions.change(edits=True)  # type: ignore[union-attr]
    if (unit := param._unit) is not None:
        flat, index = unit.find(param)
        flat.outdate_saved(index)
    with change:
        local.copy_(new)


def _plain(unsharded: Any) -> torch.Tensor | None:
    return None if is_dtensor(unsharded) else unsharded


def _alike(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device


def _misfit(param: ShardTensor, value: torch.Tensor) -> str:
    """Return why `value` can't be a gradient or the values of `param`; an empty text if it can."""
    if value.shape != param._spec.shape:
        return f"shape {tuple(value.shape)} in place of {tuple(param._spec.shape)}"
    if isinstance(value, ShardTensor) and not same_cut(param._spec, value._spec):
        return "a tensor cut differently between the ranks"
    return ""


def _may_assign_data(func: Any, args: Any, kwargs: Any) -> bool:
    """Return True if ``Module.to()`` and its like may assign to ``.data``, which checks the value.

    Otherwise they put the converted tensor into the module as a new parameter. That is right for another dtype: the engine's
    shards keep theirs, and the new parameter is a tensor that was computed from the old one. A model that was converted like
    this can be saved, but can't run. The mark on the converted tensor keeps ``Module.to()`` from swapping it in, see
    ``ShardTensor.__tensor_flatten__``.
    """
    param, value = args
    if not isinstance(value, ShardTensor) or value is param:
        return True
    value._shard_state.converted = True
    is_param = isinstance(param, ShardTensor) and param._unit_ref is not None
    return not (is_param and value._local.dtype != param._local.dtype and value.device == param._local.device)


def _register_hook(func: Any, args: Any, kwargs: Any) -> Any:
    param = args[0]
    unit = param._unit
    hook = args[1] if len(args) > 1 else kwargs["hook"]
    with _NoTorchFunction():
        if unit is None or not param.requires_grad or is_alias(param):
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

    def __exit__(self, *_: object) -> None:
        self.remove()


HANDLERS: dict[Any, Callable[[Any, Any, Any], Any]] = {
    _T.register_hook: _register_hook,
    _T.register_post_accumulate_grad_hook: _register_hook,
    torch._has_compatible_shallow_copy_type: _may_assign_data,  # type: ignore[attr-defined]
}
"""The replacements of torch functions, by function, called with ``(function, args, kwargs)``."""
