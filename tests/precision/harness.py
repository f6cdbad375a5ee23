"""A sharded model in mixed precision beside what it stands for: masters, and a copy of them in low precision for every step.

The copy is made and run by plain torch; gradients are divided by the number of ranks in the dtype of the computation and summed
in that of storage, in the order of the ranks, so that results can be equal to the bit.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import torch_shard
from tests.compat.harness import MLP, batch, loss_of, whole
from torch_shard.shard_tensor.tensor import ShardTensor

__all__ = ["MLP", "Mixed", "batch", "loss_of", "low_copy", "mean_over_ranks", "same_bits", "whole"]


def same_bits(actual: Any, expected: Any, what: str = "") -> None:
    """Equal in dtype, shape and every bit. Collective for a sharded tensor."""
    actual, expected = whole(actual), whole(expected)
    torch.testing.assert_close(actual, expected, rtol=0, atol=0, equal_nan=True, msg=lambda text: f"{what}: {text}")


class _In:
    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, module: nn.Module, args: Any) -> Any:
        self.given = args[0].dtype
        return tuple(a.to(self.dtype) for a in args)


def low_copy(
    model: nn.Module, dtype: torch.dtype, keep: tuple[type[nn.Module], ...] = (), cast: bool = True
) -> nn.Module:
    """A copy whose parameters have `dtype`, except in modules of the classes `keep`, whose inputs and outputs are cast (with
    `cast`)."""
    low = copy.deepcopy(model)
    kept = {id(p) for m in low.modules() if isinstance(m, keep) for p in m.parameters()}
    for p in low.parameters():
        if id(p) not in kept and p.is_floating_point():
            p.data = p.data.to(dtype)
    for m in low.modules():
        if cast and keep and isinstance(m, keep):
            before = _In(next(iter(m.parameters())).dtype)
            m.register_forward_pre_hook(before)
            m.register_forward_hook(lambda _, args, out, before=before: out.to(before.given))
    return low


def mean_over_ranks(grad: torch.Tensor, stored: torch.dtype, reduce: torch.dtype) -> torch.Tensor:
    """Divided in its own dtype, sent in `reduce`, summed in `stored`. Collective."""
    world = dist.get_world_size()
    if world == 1:
        return grad.to(stored)
    mine = (grad * (1.0 / world) if reduce == grad.dtype else grad.to(reduce) * (1.0 / world)).contiguous()
    parts = [torch.empty_like(mine) for _ in range(world)]
    dist.all_gather(parts, mine)
    total = parts[0].to(stored)
    for part in parts[1:]:
        total += part
    return total


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


class Mixed:
    """A sharded model, and its masters with an optimizer of their own.

    Args:
        build: makes the model, in `stored`; seed 0.
        precision: of the sharded one. Its ``param_dtype``, ``reduce_dtype`` and classes in ``keep`` count for the copies.
        overrides: settings for ``torch_shard.shard``.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module],
        precision: torch_shard.Precision,
        *,
        stored: torch.dtype = torch.float32,
        optimizer: Callable[[nn.Module], Any] = _sgd,
        **overrides: Any,
    ) -> None:
        torch.manual_seed(0)
        self.precision, self.stored = precision, stored
        self.model = build().to(stored)
        self.masters = copy.deepcopy(self.model)
        self.engine = torch_shard.shard(
            self.model, **{"unit_bytes": 300, "timeout": 20.0, "precision": precision, **overrides}
        )
        self.optimizer, self.plain_optimizer = optimizer(self.model), optimizer(self.masters)

    def low(self) -> nn.Module:
        """The copy that a step computes with."""
        dtype = self.precision.param_dtype
        assert dtype is not None
        cast = self.precision.cast_inputs is True
        return low_copy(self.masters, dtype, tuple(k for k in self.precision.keep if isinstance(k, type)), cast)

    def backward(self, x: torch.Tensor) -> None:
        """Forward and backward on both; the masters get the mean of the copies' gradients, added to what they have."""
        loss_of(self.model(x)).backward()
        low = self.low()
        loss_of(low(x.to(self.precision.param_dtype))).backward()
        for p, q in zip(self.masters.parameters(), low.parameters(), strict=True):
            if q.grad is not None:
                reduce = q.dtype if self.precision.reduce_dtype is None else self.precision.reduce_dtype
                mean = mean_over_ranks(q.grad, p.dtype, reduce)
                p.grad = mean if p.grad is None else p.grad + mean

    def check_grads(self, same: Callable[..., None] = same_bits) -> None:
        """Gradients agree. Collective."""
        theirs = dict(self.masters.named_parameters())
        for name, p in self.model.named_parameters():
            assert (p.grad is None) == (theirs[name].grad is None), name
            if p.grad is not None:
                assert isinstance(p.grad, ShardTensor)
                same(p.grad, theirs[name].grad, f"{name}.grad")

    def check(self, same: Callable[..., None] = same_bits) -> None:
        """Parameters agree. Collective."""
        theirs = dict(self.masters.named_parameters())
        for name, p in self.model.named_parameters():
            same(p, theirs[name], name)

    def update(self) -> None:
        """A step of both optimizers."""
        for optimizer in (self.optimizer, self.plain_optimizer):
            optimizer.step()
            optimizer.zero_grad()

    def train(self, rank: int, steps: int = 3, same: Callable[..., None] = same_bits) -> None:
        """Some steps; gradients and parameters agree at each."""
        for step in range(steps):
            self.backward(batch(rank, step).to(self.stored))
            self.check_grads(same)
            self.update()
            self.check(same)
