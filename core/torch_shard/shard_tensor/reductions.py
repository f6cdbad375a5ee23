"""Reductions of a ShardTensor to a scalar: over the local shard, and then by one small collective.

All of them are collective: call them on all ranks. The result is that of the full parameter, as a plain tensor that is equal
on all ranks. A reduction over some of the dimensions needs the full parameter, and is an error here.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ..comm.small_collectives import ScalarComm
from .spec import ShardSpec, gather_error, same_cut, shard_of_full

if TYPE_CHECKING:
    from .tensor import ShardTensor

__all__ = ["REDUCTIONS", "extreme", "foreach_norm", "full_reduction", "total", "unscale_and_check"]


def total(local: torch.Tensor, comm: ScalarComm, what: str) -> torch.Tensor:
    """Return the sum of `local` over the ranks, in its shape and dtype. Collective."""
    if local.is_complex():
        return torch.view_as_complex(total(torch.view_as_real(local), comm, what))
    # Summed in double, so that the sum over the ranks adds no rounding of its own, and halves do not overflow.
    wide = local.to(torch.float64 if local.is_floating_point() else torch.int64)
    return comm.all_reduce(wide.clone() if wide is local else wide, "sum", what).to(local.dtype)


def extreme(local: torch.Tensor, largest: bool, comm: ScalarComm, what: str) -> torch.Tensor:
    """Return the largest (or smallest) element of all ranks' 1-D `local`, 0-dim; NaN if any is NaN. Collective."""
    dtype = local.dtype
    if dtype.is_floating_point:
        # Some backends drop NaN in a maximum, so that NaN travels as a flag.
        sign = 1.0 if largest else -1.0
        message = torch.tensor([-math.inf, 0.0], dtype=torch.float64, device=local.device)
        if local.numel():
            best = (local.amax() if largest else local.amin()).double() * sign
            nan = best.isnan()
            message = torch.stack([best.masked_fill(nan, -math.inf), nan.double()])
        best, nan = comm.all_reduce(message, "max", what).unbind()
        return (best * sign).masked_fill(nan > 0, math.nan).to(dtype)
    info = torch.iinfo(torch.int64)
    best = torch.tensor(info.min if largest else info.max, device=local.device)
    if local.numel():
        best = (local.amax() if largest else local.amin()).to(torch.int64)
    return comm.all_reduce(best, "max" if largest else "min", what).to(dtype)


def _flag(local: torch.Tensor, wanted_by_all: bool, comm: ScalarComm, what: str) -> torch.Tensor:
    flag = local.to(torch.int64)
    return comm.all_reduce(flag, "min" if wanted_by_all else "max", what).to(torch.bool)


def _what(func: Any, spec: ShardSpec) -> str:
    return f"{getattr(func, '_opname', func)} of the sharded {spec.name}"


def full_reduction(spec: ShardSpec, dims: Any) -> bool:
    """Return True if a reduction over `dims` leaves a single value."""
    if dims is None or dims == () or dims == []:
        return True
    if isinstance(dims, int):
        dims = [dims]
    ndim = len(spec.shape)
    if ndim == 0:
        return True
    return all(-ndim <= d < ndim for d in dims) and {d % ndim for d in dims} == set(range(ndim))


def _shaped(result: torch.Tensor, spec: ShardSpec, keepdim: bool) -> torch.Tensor:
    return result.reshape((1,) * len(spec.shape)) if keepdim else result


def _arguments(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    names = [argument.name for argument in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _one(cls: type[ShardTensor], func: Any, args: Any, kwargs: Any) -> tuple[ShardSpec, torch.Tensor, dict[str, Any]]:
    """Return spec, local shard and named arguments of a reduction over all dimensions; raise for any other."""
    named = _arguments(func, args, kwargs)
    source = args[0] if args else None
    if (
        not isinstance(source, cls)
        or named.get("out") is not None
        or not full_reduction(source._spec, named.get("dim"))
    ):
        raise gather_error([source._spec] if isinstance(source, cls) else [], str(func))
    return source._spec, source._local, named


def _empty(func: Any, spec: ShardSpec, local: torch.Tensor, args: Any, kwargs: Any) -> Any:
    # Without elements there is nothing to communicate; plain torch decides if that is an error.
    return func(local.new_empty(spec.shape), *args[1:], **kwargs)


def _sum(cls: type[ShardTensor], func: Any, args: Any, kwargs: Any) -> Any:
    spec, local, named = _one(cls, func, args, kwargs)
    if spec.numel == 0:
        return _empty(func, spec, local, args, kwargs)
    dtype = named.get("dtype") or (local.dtype if local.is_floating_point() or local.is_complex() else torch.int64)
    mean = func._opname == "mean"
    if mean and not (dtype.is_floating_point or dtype.is_complex):
        return _empty(func, spec, local, args, kwargs)  # raises what plain torch raises
    # Halves are summed in float and rounded once, as in torch's own kernels.
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    result = total(local.sum(dtype=wide), spec.comm, _what(func, spec))
    if mean:
        result = result / spec.numel
    return _shaped(result.to(dtype), spec, named.get("keepdim", False))


def _variance(cls: type[ShardTensor], func: Any, args: Any, kwargs: Any) -> Any:
    spec, local, named = _one(cls, func, args, kwargs)
    correction = named.get("correction")
    if correction is None:
        correction = 1 if named.get("unbiased", True) else 0
    if spec.numel == 0 or not local.is_floating_point():
        return _empty(func, spec, local, args, kwargs)
    what = _what(func, spec)
    wide = local.double()
    mean = total(wide.sum(), spec.comm, what) / spec.numel
    squares = total((wide - mean).square().sum(), spec.comm, what)
    result = squares / max(spec.numel - correction, 0)
    result = result.sqrt() if func._opname == "std" else result
    return _shaped(result.to(local.dtype), spec, named.get("keepdim", False))


def _extreme(cls: type[ShardTensor], func: Any, args: Any, kwargs: Any) -> Any:
    spec, local, named = _one(cls, func, args, kwargs)
    if "dim" in named and func._opname in ("max", "min"):  # would also return indices
        raise gather_error([spec], str(func))
    if spec.numel == 0:
        return _empty(func, spec, local, args, kwargs)
    result = extreme(local, func._opname in ("max", "amax"), spec.comm, _what(func, spec))
    return _shaped(result, spec, named.get("keepdim", False))


def _any_all(cls: type[ShardTensor], func: Any, args: Any, kwargs: Any) -> Any:
    spec, local, named = _one(cls, func, args, kwargs)
    every = func._opname == "all"
    flag = local.all() if every else local.any()
    result = _flag(flag, every, spec.comm, _what(func, spec)) if spec.numel else flag
    if local.dtype == torch.uint8:
        result = result.to(torch.uint8)  # as in plain torch
    return _shaped(result, spec, named.get("keepdim", False))


def _count_nonzero(cls: type[ShardTensor], func: Any, args: Any, kwargs: Any) -> Any:
    spec, local, _ = _one(cls, func, args, kwargs)
    return total(local.count_nonzero(), spec.comm, _what(func, spec)) if spec.numel else local.count_nonzero()


def _item(cls: type[ShardTensor], func: Any, args: Any, kwargs: Any) -> Any:
    # One rank has the value of a one-element parameter, which is its sum.
    source = args[0]
    spec, local = source._spec, source._local
    if spec.numel != 1:
        return func(local.new_empty(spec.shape))  # raises what plain torch raises
    value = local.sum() if local.dtype != torch.bool else local.any().to(torch.int64)
    value = total(value, spec.comm, _what(func, spec)).to(local.dtype)
    return value.item()


def _dot(cls: type[ShardTensor], func: Any, args: Any, kwargs: Any) -> Any:
    first, second = args
    if not (isinstance(first, cls) and isinstance(second, cls) and same_cut(first._spec, second._spec)):
        raise gather_error([t._spec for t in args if isinstance(t, cls)], str(func))
    dtype, locals_ = first.dtype, [first._local, second._local]
    if dtype == second.dtype and dtype in (torch.float16, torch.bfloat16):
        locals_ = [local.float() for local in locals_]
    return total(func(*locals_), first._spec.comm, _what(func, first._spec)).to(dtype)


def _equal(cls: type[ShardTensor], func: Any, args: Any, kwargs: Any) -> bool:
    first, second = args[0], args[1]
    if first.shape != second.shape:
        return False
    sharded = first if isinstance(first, cls) else second
    spec = sharded._spec
    if isinstance(first, cls) and isinstance(second, cls) and not same_cut(first._spec, second._spec):
        raise gather_error([first._spec, second._spec], str(func), "needs both cut alike, and they are not")
    locals_ = [t._local if isinstance(t, cls) else shard_of_full(t, spec) for t in (first, second)]
    same = torch.tensor(func(*locals_, *args[2:], **kwargs), device=sharded._local.device)
    return bool(_flag(same, True, spec.comm, _what(func, spec))) if spec.numel else True


# -- norms --------------------------------------------------------------------------------------------------------


def _local_norm(local: torch.Tensor, order: float, dtype: torch.dtype | None) -> torch.Tensor:
    """Return the norm of one shard in double; the neutral value if it is empty."""
    if local.numel() == 0:
        return torch.tensor(math.inf if order < 0 else 0.0, dtype=torch.float64, device=local.device)
    dtype = dtype or local.dtype
    if dtype in (torch.float16, torch.bfloat16):
        dtype = torch.float32  # rounded once, at the end
    return torch.linalg.vector_norm(local, order, dtype=dtype).double()


def _join_norms(norms: torch.Tensor, order: float) -> torch.Tensor:
    """Return the norms of full tensors from those of their shards; `norms` has shape ``[ranks, tensors]``, in double."""
    if order == 0:
        return norms.sum(0)
    return torch.linalg.vector_norm(norms, order, dim=0)


def _real(dtype: torch.dtype) -> torch.dtype:
    return dtype.to_real() if dtype.is_complex else dtype


def _vector_norm(cls: type[ShardTensor], func: Any, args: Any, kwargs: Any) -> Any:
    spec, local, named = _one(cls, func, args, kwargs)
    order = named.get("ord", named.get("p", 2))
    order = 2.0 if order is None else float(order)
    dtype = named.get("dtype")
    if spec.numel == 0 or not (local.is_floating_point() or local.is_complex()):
        return _empty(func, spec, local, args, kwargs)
    norm = _local_norm(local, order, dtype).reshape(1)
    result = _join_norms(spec.comm.all_gather(norm, _what(func, spec)), order)[0]
    return _shaped(result.to(_real(dtype or local.dtype)), spec, named.get("keepdim", False))


def foreach_norm(cls: type[ShardTensor], func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Return the norm of each tensor of a list, 0-dim. Collective, with one message for the list."""
    named = _arguments(func, args, kwargs)
    tensors, order, dtype = named["self"], float(named.get("ord", 2)), named.get("dtype")
    results: list[Any] = [None] * len(tensors)
    groups: dict[Any, list[int]] = {}
    for i, t in enumerate(tensors):
        if not isinstance(t, cls):
            results[i] = torch.linalg.vector_norm(t, order, dtype=dtype)
        elif t._spec.numel == 0:
            results[i] = torch.linalg.vector_norm(t._local.new_empty(t._spec.shape), order, dtype=dtype)
        else:
            groups.setdefault((id(t._spec.comm), t._local.device), []).append(i)
    for members in groups.values():
        specs = [tensors[i]._spec for i in members]
        norms = torch.stack([_local_norm(tensors[i]._local, order, dtype) for i in members])
        what = f"_foreach_norm of {len(members)} sharded tensors from {specs[0].name}"
        joined = _join_norms(specs[0].comm.all_gather(norms, what), order)
        for i, value in zip(members, joined.unbind(), strict=True):
            results[i] = value.to(_real(dtype or tensors[i]._local.dtype))
    return results


def unscale_and_check(cls: type[ShardTensor], func: Any, args: Any, kwargs: Any) -> None:
    """Divide gradients by the loss scale; `found_inf` becomes 1 where any rank found one. Collective."""
    gradients, found_inf, inverse_scale = args
    slices = [t._local if isinstance(t, cls) else t for t in gradients]
    if found_inf.device.type == "cpu" and torch.cuda.is_available() and torch.cuda.is_initialized():
        # The gradients are in host memory, and the scale of the GradScaler is on the GPU: the scaler has started copies of
        # scale and `found_inf` to the host. Hazards: reading the scale before it has arrived, and writing `found_inf` before.
        torch.cuda.current_stream().synchronize()
    func(slices, found_inf, inverse_scale)
    # The operator does not increment versions itself, by which the engine knows if a cached norm is still right.
    torch.autograd.graph.increment_version(slices)
    comms = {id(t._spec.comm): t._spec for t in gradients if isinstance(t, cls)}
    for spec in comms.values():
        spec.comm.all_reduce(found_inf, "max", f"the check for non-finite gradients from {spec.name} on")


REDUCTIONS: dict[str, Callable[[Any, Any, Any, Any], Any]] = {
    "sum": _sum,
    "mean": _sum,
    "std": _variance,
    "var": _variance,
    "max": _extreme,
    "min": _extreme,
    "amax": _extreme,
    "amin": _extreme,
    "any": _any_all,
    "all": _any_all,
    "count_nonzero": _count_nonzero,
    "dot": _dot,
    "vdot": _dot,
    "equal": _equal,
    "allclose": _equal,
    "_local_scalar_dense": _item,
    "linalg_vector_norm": _vector_norm,
    "norm": _vector_norm,
}
"""Reductions by the operator's name. Each is collective and returns a plain tensor (``equal`` and ``item``: a number)."""
