"""Reductions of a ShardTensor to a scalar: over the local shard, and then by one small collective.

All of them are collective: call them on all ranks. The result is that of the full parameter, as a plain tensor that is equal
on all ranks. A reduction over some of the dimensions needs the full parameter, and is an error here.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch

from ..comm.streams import current_streams
from .spec import ShardSpec, broadcast_shard, gather_error, refuse_unreduced, same_cut
from .tensor import ShardTensor


def _total(local: torch.Tensor, spec: ShardSpec, func: Any) -> torch.Tensor:
    """Return the sum of `local` over the ranks, in its shape and dtype. Collective."""
    if local.is_complex():
        return torch.view_as_complex(_total(torch.view_as_real(local), spec, func))
    # Summed in double, so that the sum over the ranks adds no rounding of its own, and halves do not overflow.
    wide = local.to(torch.float64 if local.is_floating_point() else torch.int64)
    return spec.comm.all_reduce(wide.clone() if wide is local else wide, "sum", _what(func, spec)).to(local.dtype)


def _extreme_of(local: torch.Tensor, largest: bool, spec: ShardSpec, func: Any) -> torch.Tensor:
    """Return the largest (or smallest) element of all ranks' `local`, 0-dim; NaN if any is NaN. Collective."""
    wide = torch.float64 if local.dtype.is_floating_point else torch.int64
    if local.numel():
        own = local.amax() if largest else local.amin()
    elif wide is torch.float64:
        own = torch.tensor(-math.inf if largest else math.inf, device=local.device)
    else:
        own = torch.tensor(torch.iinfo(wide).min if largest else torch.iinfo(wide).max, device=local.device)
    # Not an all-reduce, since some backends drop NaN in a maximum.
    ranks = spec.comm.all_gather(own.to(wide), _what(func, spec))
    return (ranks.amax() if largest else ranks.amin()).to(local.dtype)


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


def _shaped(result: torch.Tensor, spec: ShardSpec, named: dict[str, Any]) -> torch.Tensor:
    return result.reshape((1,) * len(spec.shape)) if named.get("keepdim") else result


def _arguments(func: Any, args: Any, kwargs: Any) -> dict[str, Any]:
    names = [argument.name for argument in func._schema.arguments]
    return {**dict(zip(names, args, strict=False)), **kwargs}


def _one(func: Any, args: Any, kwargs: Any) -> tuple[ShardSpec, torch.Tensor, dict[str, Any]]:
    """Return spec, local shard and named arguments of a reduction over all dimensions; raise for any other."""
    refuse_unreduced(args, func)
    named = _arguments(func, args, kwargs)
    source = args[0] if args else None
    if (
        not isinstance(source, ShardTensor)
        or named.get("out") is not None
        or not full_reduction(source._spec, named.get("dim"))
        or ("dim" in named and func._opname in ("max", "min"))  # would also return indices
    ):
        raise gather_error((args, kwargs), func)
    return source._spec, source._local, named


def _plain(func: Any, spec: ShardSpec, local: torch.Tensor, args: Any, kwargs: Any) -> Any:
    """Let plain torch reduce an empty tensor, or raise for a dtype; there is nothing to communicate."""
    return func(local.new_empty(spec.shape), *args[1:], **kwargs)


def _sum(func: Any, args: Any, kwargs: Any) -> Any:
    spec, local, named = _one(func, args, kwargs)
    dtype = named.get("dtype") or (local.dtype if local.is_floating_point() or local.is_complex() else torch.int64)
    mean = func._opname == "mean"
    if spec.numel == 0 or (mean and not (dtype.is_floating_point or dtype.is_complex)):
        return _plain(func, spec, local, args, kwargs)
    # Halves are summed in float and rounded once, as in torch's own kernels.
    wide = torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype
    own = local.count_nonzero() if func._opname == "count_nonzero" else local.sum(dtype=wide)
    result = _total(own, spec, func)
    if mean:
        result = result / spec.numel
    return _shaped(result if func._opname == "count_nonzero" else result.to(dtype), spec, named)


def _variance(func: Any, args: Any, kwargs: Any) -> Any:
    spec, local, named = _one(func, args, kwargs)
    if spec.numel == 0 or not local.is_floating_point():
        return _plain(func, spec, local, args, kwargs)
    correction = named.get("correction")
    if correction is None:
        correction = 1 if named.get("unbiased", True) else 0
    wide = local.double()
    mean = _total(wide.sum(), spec, func) / spec.numel
    squares = _total((wide - mean).square().sum(), spec, func)
    result = squares / max(spec.numel - correction, 0)
    return _shaped((result.sqrt() if func._opname == "std" else result).to(local.dtype), spec, named)


def _extreme(func: Any, args: Any, kwargs: Any) -> Any:
    spec, local, named = _one(func, args, kwargs)
    if spec.numel == 0:
        return _plain(func, spec, local, args, kwargs)
    name, dtype = func._opname, local.dtype
    if name in ("any", "all"):
        local, dtype = local != 0, torch.uint8 if dtype == torch.uint8 else torch.bool  # as in plain torch
    result = _extreme_of(local, name in ("max", "amax", "any"), spec, func)
    return _shaped(result.to(dtype), spec, named)


def _item(func: Any, args: Any, kwargs: Any) -> Any:
    spec, local = args[0]._spec, args[0]._local
    if spec.numel != 1:
        return _plain(func, spec, local, (), {})  # raises what plain torch raises
    refuse_unreduced(args, func)
    # One rank has the value of a one-element parameter, which is its sum.
    return _total(local.sum(), spec, func).to(local.dtype).item()


def _equal(func: Any, args: Any, kwargs: Any) -> bool:
    pair = args[:2]
    if func._opname == "equal" and pair[0].shape != pair[1].shape:
        return False
    refuse_unreduced(pair, func)
    specs = [t._spec for t in pair if isinstance(t, ShardTensor)]
    if not same_cut(specs[0], specs[-1]):
        raise gather_error(pair, func, "needs both cut alike, and they are not")
    spec = specs[0]
    shards = [t._local if isinstance(t, ShardTensor) else broadcast_shard(t, spec, func) for t in pair]
    same = torch.tensor(func(*shards, *args[2:], **kwargs), device=shards[0].device)
    return bool(_extreme_of(same, False, spec, func)) if spec.numel else True


# -- norms --------------------------------------------------------------------------------------------------------


def _local_norm(local: torch.Tensor, order: float, dtype: torch.dtype | None) -> torch.Tensor:
    """Return the norm of one shard in double; the neutral value if it is empty."""
    if local.numel() == 0:
        return torch.tensor(math.inf if order < 0 else 0.0, dtype=torch.float64, device=local.device)
    dtype = dtype or local.dtype
    if dtype in (torch.float16, torch.bfloat16):
        dtype = torch.float32  # rounded once, at the end
    return torch.linalg.vector_norm(local, order, dtype=dtype).double()


def _norms(
    tensors: Sequence[ShardTensor], order: float, dtype: torch.dtype | None, what: str
) -> Iterable[torch.Tensor]:
    """Return the norms of full tensors that have elements, 0-dim. Collective, with one message."""
    own = torch.stack([_local_norm(t._local, order, dtype) for t in tensors])
    shards = tensors[0]._spec.comm.all_gather(own, what)
    norms = shards.sum(0) if order == 0 else torch.linalg.vector_norm(shards, order, dim=0)
    for t, norm in zip(tensors, norms.unbind(), strict=True):
        result = dtype or t._local.dtype
        yield norm.to(result.to_real() if result.is_complex else result)


def _vector_norm(func: Any, args: Any, kwargs: Any) -> Any:
    spec, local, named = _one(func, args, kwargs)
    if spec.numel == 0 or not (local.is_floating_point() or local.is_complex()):
        return _plain(func, spec, local, args, kwargs)
    order = named.get("ord", named.get("p"))
    (norm,) = _norms([args[0]], 2.0 if order is None else float(order), named.get("dtype"), _what(func, spec))
    return _shaped(norm, spec, named)


def foreach_norm(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """Return the norm of each tensor of a list, 0-dim. Collective, with one message for the list."""
    refuse_unreduced(args, func)
    named = _arguments(func, args, kwargs)
    tensors, order, dtype = named["self"], float(named.get("ord", 2)), named.get("dtype")
    results: list[Any] = [None] * len(tensors)
    groups: dict[Any, list[int]] = {}
    for i, t in enumerate(tensors):
        if isinstance(t, ShardTensor) and t._spec.numel:
            groups.setdefault((id(t._spec.comm), t._local.device), []).append(i)
        else:
            full = t._local.new_empty(t._spec.shape) if isinstance(t, ShardTensor) else t
            results[i] = torch.linalg.vector_norm(full, order, dtype=dtype)
    for members in groups.values():
        chosen = [tensors[i] for i in members]
        what = f"_foreach_norm of {len(members)} sharded tensors from {chosen[0]._spec.name}"
        for i, norm in zip(members, _norms(chosen, order, dtype, what), strict=True):
            results[i] = norm
    return results


def unscale_and_check(func: Any, args: Any, kwargs: Any) -> None:
    """Divide gradients by the loss scale; `found_inf` becomes 1 where any rank found one. Collective."""
    gradients, found_inf, inverse_scale = args
    shards = [t._local if isinstance(t, ShardTensor) else t for t in gradients]
    if found_inf.device.type == "cpu":
        # The gradients are in host memory, and the scale of the GradScaler is on the GPU: the scaler has started copies of
        # scale and `found_inf` to the host. Hazards: reading the scale, or writing `found_inf`, before its copy has ended.
        current_streams().finish()
    func(shards, found_inf, inverse_scale)
    # The operator does not increment versions itself, by which the engine knows whether a cached norm is still right.
    torch.autograd.graph.increment_version(shards)
    comms = {id(t._spec.comm): t._spec for t in gradients if isinstance(t, ShardTensor)}
    for spec in comms.values():
        spec.comm.all_reduce(found_inf, "max", f"the check for non-finite gradients from {spec.name} on")


REDUCTIONS: dict[str, Callable[[Any, Any, Any], Any]] = {
    "sum": _sum,
    "mean": _sum,
    "std": _variance,
    "var": _variance,
    "max": _extreme,
    "min": _extreme,
    "amax": _extreme,
    "amin": _extreme,
    "any": _extreme,
    "all": _extreme,
    "count_nonzero": _sum,
    "equal": _equal,
    "allclose": _equal,
    "_local_scalar_dense": _item,
    "linalg_vector_norm": _vector_norm,
    "norm": _vector_norm,
}
"""Reductions by the operator's name. Each is collective and returns a plain tensor (``equal`` and ``item``: a number)."""
