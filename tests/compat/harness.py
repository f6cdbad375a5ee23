"""Trains a sharded model and a plain copy of it with the same code, and compares them.

::

    @ranks(2)
    def test_a_row(rank, world_size):
        pair = Pair(MLP, rank, world_size, unit_bytes=300)
        pair.train(0, 1)
        pair.step(lambda model, x: model(x).pow(2).mean().backward(), batch(rank, 2))
        pair.check()

The plain copy sees the same batch of this rank; its gradients are then averaged over the ranks, as DDP does it. All in
float64 with SGD, so that a wrong gradient scale shows. ``train_both`` does the whole of the above.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import torch_shard
from tests.compat.modes import COMPUTED, STORED, as_computed, mixed, sums_in_low_precision, tolerance
from tests.support.models import MLP as MLP
from tests.support.models import Block as Block
from tests.support.models import Checkpointed as Checkpointed
from tests.support.models import loss_of as loss_of
from torch_shard.shard_tensor.spec import shard_of_full
from torch_shard.shard_tensor.tensor import ShardTensor

RTOL, ATOL = 1e-9, 1e-10


def batch(rank: int, step: int, *shape: int) -> torch.Tensor:
    """This rank's random inputs of a step, of shape (4, 5) by default."""
    return torch.randn(
        *(shape or (4, 5)), generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64
    )


def whole(tensor: Any) -> Any:
    """A sharded tensor as a plain one (collective), anything else as it is."""
    if isinstance(tensor, ShardTensor):
        return tensor.detach().full_tensor()
    return tensor.detach() if isinstance(tensor, torch.Tensor) else tensor


def mean_over_ranks(flat: torch.Tensor) -> torch.Tensor:
    """Mean of gradients. Collective. Under mixed precision divided and sent in the dtype of the computation, and summed in that
    of storage, or for replicas in that of the computation, as the engine does it."""
    world = dist.get_world_size()
    if not mixed() or flat.dtype is not STORED:
        dist.all_reduce(flat)
        return flat / world
    low = flat.to(COMPUTED)
    sent = torch.where(low.to(STORED) == flat, low * (1 / world), (flat * (1 / world)).to(COMPUTED))
    if sums_in_low_precision():
        dist.all_reduce(sent)
        return sent.to(STORED)
    parts = [torch.empty_like(sent) for _ in range(world)]
    dist.all_gather(parts, sent)
    total = parts[0].to(STORED)
    for part in parts[1:]:
        total += part
    return total


def average_grads(model: nn.Module) -> None:
    """Mean over the ranks; None counts as zero where another rank has a gradient. What DDP does."""
    parameters = list(model.parameters())
    seen = torch.tensor([float(p.grad is not None) for p in parameters])
    dist.all_reduce(seen)
    used = [p for p, count in zip(parameters, seen.tolist(), strict=True) if count]
    for p in used:
        if p.grad is None:
            p.grad = torch.zeros_like(p)
    # One message for all gradients of a kind: most tests here spend their time in messages.
    for kind in dict.fromkeys((p.dtype, p.device) for p in used):
        grads = [p.grad.detach() for p in used if (p.dtype, p.device) == kind]
        flat = mean_over_ranks(torch.cat([grad.reshape(-1) for grad in grads]))
        for grad, mean in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
            grad.copy_(mean.view(grad.shape))


def same(actual: Any, expected: Any, what: str = "") -> None:
    """Assert that two tensors agree; a sharded one is gathered first (collective)."""
    actual, expected = whole(actual), whole(expected)
    rtol, atol = tolerance()
    # Under mixed precision the plain model's hooks see masters, say, where ours see what is computed with.
    torch.testing.assert_close(
        actual, expected, rtol=rtol, atol=atol, check_dtype=not mixed(), msg=lambda text: f"{what}: {text}"
    )


def same_params(model: nn.Module, plain: nn.Module) -> None:
    """Assert that two models' parameters and buffers agree by name. Collective."""
    ours, theirs = dict(model.named_parameters()), dict(plain.named_parameters())
    assert list(ours) == list(theirs)
    for name, p in theirs.items():
        assert ours[name].dtype == p.dtype, name
        same(ours[name], p, name)
    for (name, b), (other, c) in zip(model.named_buffers(), plain.named_buffers(), strict=True):
        assert name == other
        same(b, c, name)


def same_grads(model: nn.Module, plain: nn.Module) -> None:
    """Assert that gradients agree by name, None included; every rank looks at its own slices. Collective."""
    theirs = dict(plain.named_parameters())
    error = None
    try:
        for name, p in model.named_parameters():
            grad, expected = p.grad, theirs[name].grad
            # Where no rank used a parameter .grad is None on both sides.
            assert (grad is None) == (expected is None), f"{name}.grad is {grad} but should be {expected}"
            if isinstance(grad, ShardTensor):
                assert grad.shape == expected.shape and grad.dtype == expected.dtype, name
                grad, expected = grad.to_local(), shard_of_full(expected.detach(), grad._spec)
            if expected is not None:
                same(grad, expected, f"{name}.grad")
    except AssertionError as found:
        error = found
    wrong = torch.tensor(float(error is not None))
    dist.all_reduce(wrong)  # the ranks fail together, not one here and the others in what follows
    if error is not None:
        raise error
    assert not wrong.item(), "the gradients of another rank are wrong"


def _sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)


def plain_backward(model: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Forward, loss, backward: what most rows do."""
    loss = loss_of(model(*args, **kwargs))
    loss.backward()
    return loss.detach()


class Pair:
    """A sharded model and its plain copy, each with its optimizer.

    Args:
        build: makes the model; called once, with seed 0, and copied before sharding. Cast to float64 unless `double` is
            False.
        optimizer: makes an optimizer for a model; SGD(lr=0.1) over the trainable parameters by default.
        prepare: called with each model before sharding, for what a copy of a model would lack: hooks on parameters, say.
        overrides: settings for ``torch_shard.shard``; units are small by default, so that there are several.
    """

    def __init__(
        self,
        build: Callable[[], nn.Module],
        rank: int,
        world_size: int,
        *,
        optimizer: Callable[[nn.Module], Any] = _sgd,
        double: bool = True,
        prepare: Callable[[nn.Module], Any] | None = None,
        **overrides: Any,
    ) -> None:
        torch.manual_seed(0)
        self.rank, self.world_size = rank, world_size
        self.model = build()
        if double:
            self.model = self.model.double()
        self.plain = as_computed(copy.deepcopy(self.model))
        if prepare is not None:
            self.each(prepare)
        self.engine = torch_shard.shard(self.model, **{"unit_bytes": 500, "timeout": 20.0, **overrides})
        self.optimizer, self.plain_optimizer = optimizer(self.model), optimizer(self.plain)

    def backward(self, fn: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
        """Call `fn(model, *args)`, which runs forward and backward, on both; average the plain gradients."""
        ours = fn(self.model, *args)
        theirs = fn(self.plain, *args)
        average_grads(self.plain)
        return ours, theirs

    def step(self, fn: Callable[..., Any], *args: Any, grads: bool = True) -> tuple[Any, Any]:
        """One step on both; gradients are compared before it unless `grads` is False."""
        result = self.backward(fn, *args)
        if grads:
            same_grads(self.model, self.plain)
        self.update()
        return result

    def update(self) -> None:
        for optimizer in (self.optimizer, self.plain_optimizer):
            optimizer.step()
            optimizer.zero_grad()

    def each(self, fn: Callable[..., Any], *args: Any) -> tuple[Any, Any]:
        """Call `fn(model, *args)` on the sharded model and on the plain one."""
        return fn(self.model, *args), fn(self.plain, *args)

    def check(self) -> None:
        """Parameters and buffers agree. Collective."""
        same_params(self.model, self.plain)

    def train(self, *steps: int, run: Callable[..., Any] = plain_backward) -> None:
        """Train on this rank's batches of these steps, then check. Collective."""
        for step in steps:
            self.step(run, batch(self.rank, step))
        self.check()

    def copied(self, optimizer: Callable[[nn.Module], Any] = _sgd) -> Pair:
        """Deep copies of both models, with optimizers of their own."""
        other = copy.copy(self)
        other.model, other.plain = self.each(copy.deepcopy)
        other.optimizer, other.plain_optimizer = other.each(optimizer)
        return other


def train_both(
    build: Callable[[], nn.Module],
    rank: int,
    world_size: int,
    *,
    run: Callable[..., Any] = plain_backward,
    make_batch: Callable[[int, int], Any] = batch,
    steps: int = 3,
    **settings: Any,
) -> Pair:
    """Train both for some steps with ``run(model, make_batch(rank, step))``, compare gradients at every step and
    parameters at the end; `settings` go to :class:`Pair`."""
    pair = Pair(build, rank, world_size, **settings)
    for step in range(steps):
        pair.step(run, make_batch(rank, step))
    pair.check()
    return pair


def train_alike(
    model: nn.Module,
    plain: nn.Module,
    optimizers: Iterable[torch.optim.Optimizer],
    rank: int,
    *,
    steps: int = 3,
    grads: bool = True,
) -> None:
    """Train a sharded model and a plain copy of it with optimizers that are there already, which :class:`Pair` makes.

    Gradients are compared at every step unless `grads` is False.
    """
    for step in range(steps):
        for m in (model, plain):
            plain_backward(m, batch(rank, step))
        average_grads(plain)
        if grads:
            same_grads(model, plain)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def train_as_ddp(
    build: Callable[[], nn.Module],
    run: Callable[[nn.Module, Callable[[], Any], int], Any],
    *,
    steps: int = 3,
    broadcast_buffers: bool = True,
    **settings: Any,
) -> tuple[nn.Module, nn.Module]:
    """Train a sharded model, and a copy of it under DDP, for some steps with ``run(model, no_sync, step)``; return both.

    Gradients and buffers are compared at every step.
    """
    torch.manual_seed(0)
    model = build().double()
    plain = as_computed(copy.deepcopy(model))
    ddp = nn.parallel.DistributedDataParallel(plain, broadcast_buffers=broadcast_buffers)
    settings = {"unit_bytes": 500, "timeout": 20.0, "broadcast_buffers": broadcast_buffers, **settings}
    engine = torch_shard.shard(model, **settings)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05, momentum=0.9) for m in (model, plain)]
    for step in range(steps):
        run(model, engine.no_sync, step)
        run(ddp, ddp.no_sync, step)
        same_grads(model, plain)
        for (name, b), c in zip(model.named_buffers(), plain.buffers(), strict=True):
            same(b, c, f"{name} in step {step}")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return model, ddp
