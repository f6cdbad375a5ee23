"""Derivatives for which torch's own formulas would be wrong on shards, or would waste memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from ..errors import NeedsGatherError, ShardError
from .reductions import full_reduction
from .spec import gather_error, shard_of_full

if TYPE_CHECKING:
    from .tensor import ShardTensor

__all__ = [
    "NORMS",
    "GatherFull",
    "MeanShard",
    "autograd_grad",
    "differentiable_sum",
    "function_needs_gather",
    "reduces_to_scalar",
    "shared_gradient",
]

NORMS = frozenset({"norm", "vector_norm", "linalg_vector_norm", "linalg_norm"})
"""Functions whose second argument is the order and whose third the dimensions."""


def function_needs_gather(
    cls: type[ShardTensor], name: str, tensors: list[Any], why: str = "needs the whole parameter"
) -> NeedsGatherError:
    """Return the error for a function that can't be computed on shards."""
    return gather_error([t._spec for t in tensors if isinstance(t, cls)], name.removeprefix("__get__:"), why)


def reduces_to_scalar(cls: type[ShardTensor], name: str, args: Any, kwargs: Any, tensors: list[Any]) -> bool:
    """Return True if a reduction, called as a torch function, leaves a single value."""
    if len(tensors) != 1 or (args and not isinstance(args[0], cls)):
        return False
    position = 2 if name in NORMS else 1
    dims = kwargs.get("dim", kwargs.get("axis"))
    if dims is None and len(args) > position:
        dims = args[position]
    if isinstance(dims, bool):  # std(unbiased)
        dims = None
    if name in NORMS:
        order = kwargs.get("p", kwargs.get("ord", args[1] if len(args) > 1 else None))
        if order == "nuc" or (name == "linalg_norm" and order is not None and len(tensors[0]._spec.shape) > 1):
            return False  # norms of matrices
    return full_reduction(tensors[0]._spec, dims)


class _Sum(torch.autograd.Function):
    """The sum over the full parameter. torch's own derivative would be an expanded *plain* tensor."""

    @staticmethod
    def forward(ctx: Any, t: Any, dtype: torch.dtype | None) -> torch.Tensor:
        ctx.cls, ctx.spec, ctx.dtype = t._shard_class, t._spec, t.dtype
        return torch.ops.aten.sum.default(t, dtype=dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return _Spread.apply(grad.to(ctx.dtype), ctx.cls, ctx.spec), None


class _Spread(torch.autograd.Function):
    """One value at every position of the parameter. :class:`_Sum` and this are each other's derivative."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, cls: Any, spec: Any) -> Any:
        # Cloned, because autograd may keep the result as `.grad`, which is changed in place.
        return cls._wrap(value.detach().expand(spec.length).clone(memory_format=torch.contiguous_format), spec)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:  # type: ignore[override]
        return _Sum.apply(grad, None), None, None


def differentiable_sum(cls: type[ShardTensor], func: Any, name: str, args: Any, kwargs: Any, tensors: list[Any]) -> Any:
    """Return ``sum`` or ``mean`` over a full ShardTensor that requires a gradient. Collective."""
    source = tensors[0]
    if kwargs.get("out") is not None or not reduces_to_scalar(cls, name, args, kwargs, tensors):
        return func(*args, **kwargs)  # raises
    spec = source._spec
    dtype = kwargs.get("dtype")
    if name == "mean" and not (dtype or source.dtype).is_floating_point and not source.is_complex():
        return func(*args, **kwargs)  # raises
    out_dtype = dtype or source.dtype
    half = out_dtype in (torch.float16, torch.bfloat16)
    result: Any = _Sum.apply(source, torch.float32 if half else out_dtype)
    if name == "mean":
        result = result / spec.numel if spec.numel else result * float("nan")
    if half:
        result = result.to(out_dtype)
    keepdim = kwargs.get("keepdim", args[2] if len(args) > 2 else False)
    return result.reshape((1,) * len(spec.shape)) if keepdim else result


class _Shared(torch.autograd.Function):
    """The identity, whose gradient is averaged over the ranks, because each rank may weigh the value differently."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, spec: Any) -> torch.Tensor:
        ctx.spec = spec
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        spec = ctx.spec
        total = spec.comm.data_parallel.all_reduce(
            grad.detach().clone(), "sum", f"the gradient of a reduction of {spec.name}"
        )
        # With create_graph the derivative of this rank's own gradient stays in the graph.
        return grad + (total / spec.comm.data_parallel.size - grad.detach()), None


def shared_gradient(value: torch.Tensor, source: Any) -> torch.Tensor:
    """Return `value`, a reduction of `source`, with its gradient averaged over the ranks. The backward is collective."""
    if source._spec.comm.size == 1 or not value.requires_grad:
        return value
    result: torch.Tensor = _Shared.apply(value, source._spec)  # type: ignore[assignment]
    return result


class GatherFull(torch.autograd.Function):
    """The full tensor on every rank; the ranks' gradients are averaged. Forward and backward are collective."""

    @staticmethod
    def forward(ctx: Any, t: Any) -> torch.Tensor:
        ctx.cls, ctx.spec = t._shard_class, t._spec
        return t.full_tensor()  # type: ignore[no-any-return]

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return MeanShard.apply(grad, ctx.cls, ctx.spec, ctx.spec.comm.data_parallel)


class MeanShard(torch.autograd.Function):
    """The shards of the mean over the ranks of full plain tensors; the counterpart of :class:`GatherFull`. Collective.

    Derivatives of what each rank computes for itself are averaged in the end, and those of ShardTensors are not. Hence
    neither of the two derivatives divides by the number of ranks.
    """

    @staticmethod
    def forward(ctx: Any, full: torch.Tensor, cls: Any, spec: Any, everyone: Any) -> Any:
        total = full.detach().clone(memory_format=torch.contiguous_format)
        everyone.all_reduce(total, "sum", f"the gradient of {spec.name}")
        return cls._wrap(shard_of_full(total.div_(everyone.size), spec).clone(), spec)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:  # type: ignore[override]
        return GatherFull.apply(grad), None, None, None


def autograd_grad(cls: type[ShardTensor], func: Any, args: Any, kwargs: Any) -> Any:
    """Carry out ``torch.autograd.grad``. Collective.

    With respect to sharded parameters the results are the reduced gradients, as ShardTensors. Inside a forward of the model
    the results are this rank's own, full gradients.
    """
    inputs = args[1] if len(args) > 1 else kwargs["inputs"]
    inputs = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
    units = {}
    for i, t in enumerate(inputs):
        unit = t._unit_ref() if isinstance(t, cls) and t._unit_ref is not None else None
        if unit is not None:
            units[i] = unit
    if not units:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    outputs = args[0] if args else kwargs["outputs"]
    names = (
        "grad_outputs", "retain_graph", "create_graph", "only_inputs", "allow_unused", "is_grads_batched",
        "materialize_grads",
    )  # fmt: skip
    options = {**dict(zip(names, args[2:], strict=False)), **{k: v for k, v in kwargs.items() if k in names}}
    # Modules have computed with the unsharded parameters, arithmetic on shards with the ShardTensors. So there are two
    # derivatives for each parameter.
    if options.get("is_grads_batched"):
        raise function_needs_gather(cls, "autograd.grad(is_grads_batched=True)", list(inputs))
    for i, unit in units.items():
        if unit.find(inputs[i])[0].placed[inputs[i]._spec.index] is not None and not unit.in_forward:
            raise ShardError(
                f"rank {inputs[i]._spec.world_rank}: torch.autograd.grad with respect to {inputs[i]._spec.name}, which is "
                "distributed by tensor parallelism, is not supported; use backward()."
            )
    materialize = bool(options.pop("materialize_grads", False))
    allow_unused = bool(options.pop("allow_unused", None) or materialize)
    leaves = [unit.differentiable(inputs[i]) for i, unit in units.items()]
    with torch._C.DisableTorchFunctionSubclass():
        grads = list(func(outputs, (*inputs, *leaves), allow_unused=True, **options))
    own, of_unsharded = grads[: len(inputs)], grads[len(inputs) :]
    with torch.set_grad_enabled(bool(options.get("create_graph"))):
        for (i, unit), grad in zip(units.items(), of_unsharded, strict=True):
            if unit.in_forward:  # in an inner step of the model itself (MAML) each rank has its own, as under DDP
                own[i] = grad if own[i] is None else GatherFull.apply(own[i]) + (0 if grad is None else grad)
            else:
                own[i] = _reduced(cls, unit, inputs[i], own[i], grad)
    if not allow_unused and any(grad is None for grad in own):
        raise RuntimeError(
            "One of the differentiated Tensors appears to not have been used in the graph. "
            "Set allow_unused=True if this is the desired behavior."
        )
    if materialize:
        with torch._C.DisableTorchFunctionSubclass():
            own = [torch.zeros_like(t) if grad is None else grad for t, grad in zip(inputs, own, strict=True)]
    return tuple(own)


def _reduced(cls: type[ShardTensor], unit: Any, param: Any, from_shards: Any, from_unsharded: Any) -> Any:
    spec, everyone = param._spec, unit.collectives.data_parallel  # all replicas, since their gradients differ, too
    used = torch.tensor(float(from_unsharded is not None), device=param._local.device)
    if not everyone.all_reduce(used, "max", f"torch.autograd.grad for {spec.name}"):
        return from_shards
    stored = param._local.dtype  # as in plain torch, the result has the dtype of the parameter
    if from_unsharded is None:  # only other ranks have used the parameter
        from_unsharded = torch.zeros(spec.shape, dtype=stored, device=param.device)
    grad: Any = MeanShard.apply(from_unsharded.to(stored), cls, spec, everyone)
    return grad if from_shards is None else grad + from_shards
