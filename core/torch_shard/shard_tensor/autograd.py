"""Derivatives for which torch's own formulas would be wrong on shards, or would waste memory."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from ..errors import ShardError
from .aliases import is_alias
from .derivation import full_tensor
from .function_sets import NORMS
from .reductions import full_reduction
from .spec import ShardSpec, gather_error
from .tensor import ShardTensor


def reduces_to_scalar(name: str, args: Any, kwargs: Any, tensors: list[Any]) -> bool:
    """Return True if a reduction, called as a torch function, leaves a single value."""
    if len(tensors) != 1 or (args and not isinstance(args[0], ShardTensor)):
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


# -- reductions to a scalar -------------------------------------------------------------------------------------------


class ShardedGradient(torch.autograd.Function):
    """The identity on a ShardTensor, whose gradient becomes a ShardTensor. Apply it to the operand of a reduction.

    torch's own derivative of a sum is one value, expanded to a *plain* tensor of the full shape, which `.grad` would hold in
    memory of the full size.
    """

    @staticmethod
    def forward(ctx: Any, t: Any) -> Any:
        ctx.spec = t._spec
        return t.view_as(t)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:  # type: ignore[override]
        return grad if isinstance(grad, ShardTensor) else _Cut.apply(grad, ctx.spec)


class _Cut(torch.autograd.Function):
    """The shard of a full plain tensor that is the same on all ranks. The backward is collective."""

    @staticmethod
    def forward(ctx: Any, full: torch.Tensor, spec: ShardSpec) -> Any:
        return ShardTensor.from_full(full, spec)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:  # type: ignore[override]
        return GatherFull.apply(grad), None


class _Shared(torch.autograd.Function):
    """The identity, whose gradient is averaged over the ranks, because each rank may weigh the value differently."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor, spec: ShardSpec) -> torch.Tensor:
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


# -- full tensors -----------------------------------------------------------------------------------------------------


class GatherFull(torch.autograd.Function):
    """The full tensor on every rank; the ranks' gradients are averaged. Forward and backward are collective."""

    @staticmethod
    def forward(ctx: Any, t: Any) -> torch.Tensor:
        ctx.spec = t._spec
        unit = t._unit
        if unit is not None and unit.is_summoned:
            return unit.unsharded_param_of(t).detach().clone()  # edited, perhaps
        return full_tensor(t, recording=t.requires_grad)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:  # type: ignore[override]
        return _MeanShard.apply(grad, ctx.spec)


class _MeanShard(torch.autograd.Function):
    """The shards of the mean over the ranks of full plain tensors; the counterpart of :class:`GatherFull`. Collective.

    Derivatives of what each rank computes for itself are averaged in the end, and those of ShardTensors are not. Hence
    neither of the two derivatives divides by the number of ranks.
    """

    @staticmethod
    def forward(ctx: Any, full: torch.Tensor, spec: ShardSpec) -> Any:
        return ShardTensor.from_full(mean_over_ranks(full, spec, spec.comm.data_parallel), spec)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:  # type: ignore[override]
        return GatherFull.apply(grad), None


# -- torch.autograd.grad ----------------------------------------------------------------------------------------------


_GRAD = inspect.signature(torch.autograd.grad)


def autograd_grad(func: Any, args: Any, kwargs: Any) -> Any:
    """Carry out ``torch.autograd.grad``; with respect to sharded parameters the results are this rank's full gradients.

    That is what DDP gives: each rank has the gradients of its own loss, as plain tensors in the dtype of the parameter. Averaging
    them is the caller's task. An assignment of one to ``.grad`` does that, though, as backward would (`as_gradient`). Collective
    only where ShardTensors themselves were computed with.
    """
    given = _GRAD.bind(*args, **kwargs)
    given.apply_defaults()
    options = given.arguments
    inputs = options["inputs"]
    inputs = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
    units = {
        i: unit
        for i, t in enumerate(inputs)
        if isinstance(t, ShardTensor) and (unit := t._unit) is not None and not is_alias(t)
    }
    if not units:
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)
    if options["is_grads_batched"]:
        raise gather_error(inputs, "autograd.grad(is_grads_batched=True)")
    for i, unit in units.items():
        if unit.find(inputs[i])[0].placed[inputs[i]._spec.index] is not None and not unit.runtime.in_forward:
            raise ShardError(
                f"rank {inputs[i]._spec.world_rank}: torch.autograd.grad with respect to {inputs[i]._spec.name}, which is "
                "distributed by tensor parallelism, is not supported; use backward()."
            )
    # Modules have computed with the unsharded parameters, arithmetic on shards with the ShardTensors. So there are two
    # derivatives for each parameter.
    unsharded = [unit.differentiable(inputs[i]) for i, unit in units.items()]
    materialize = options.pop("materialize_grads")
    allow_unused = options.pop("allow_unused") or materialize
    options["inputs"] = (*inputs, *unsharded)
    with torch._C.DisableTorchFunctionSubclass():
        grads = list(func(**options, allow_unused=True))
    own, of_unsharded = grads[: len(inputs)], grads[len(inputs) :]
    with torch.set_grad_enabled(options["create_graph"]):
        for i, grad in zip(units, of_unsharded, strict=True):
            if own[i] is not None:
                grad = GatherFull.apply(own[i]) + (0 if grad is None else grad)
            if grad is not None:
                grad = grad.to(inputs[i].dtype)  # outside a forward the dtype of storage, as in plain torch
            own[i] = grad
    if not allow_unused and any(grad is None for grad in own):
        raise RuntimeError(
            "One of the differentiated Tensors appears to not have been used in the graph. "
            "Set allow_unused=True if this is the desired behavior."
        )
    if materialize:
        own = [_zeros_like(t) if grad is None else grad for t, grad in zip(inputs, own, strict=True)]
    for i in units:
        if own[i] is not None:  # also zeros, which other ranks may average with their gradients
            own[i]._of_this_rank = True
    return tuple(own)


def _zeros_like(t: Any) -> torch.Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        if isinstance(t, ShardTensor):
            return torch.zeros(t.shape, dtype=t.dtype, device=t.device)
        return torch.zeros_like(t)


def is_of_this_rank(tensor: torch.Tensor) -> bool:
    """Return True for a result of ``torch.autograd.grad``: each rank has the gradient of its own loss."""
    return getattr(tensor, "_of_this_rank", False)


def mean_over_ranks(full: torch.Tensor, spec: ShardSpec, data_parallel: Any) -> torch.Tensor:
    """Return the mean of `full`, a gradient that each rank has for the parameter of `spec`. Collective over `data_parallel`."""
    total = full.detach().clone(memory_format=torch.contiguous_format)
    data_parallel.all_reduce(total, "sum", f"the gradient of {spec.name}")
    return total.div_(data_parallel.size)
