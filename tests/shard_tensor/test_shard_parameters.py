"""ShardTensors as parameters: gradients, assignments, and the optimizers of torch."""

import math

import pytest
import torch
from torch import nn

from tests.support.optimizers import OPTIMIZERS
from tests.support.ranks import ranks
from tests.support.shard_helpers import SHAPES, same, sharded, values
from torch_shard.errors import NeedsGatherError
from torch_shard.shard_tensor.tensor import ShardTensor

F = nn.functional


@ranks(2, exhaustive=(3,))
def test_autograd_through_local_arithmetic_equals_plain(rank, world_size):
    losses = [
        lambda p: p.sum(),
        lambda p: p.mean(),
        lambda p: p.pow(2).sum(),
        lambda p: (p * 3 + 1).abs().mean(),
        lambda p: p.norm(),
        lambda p: torch.linalg.vector_norm(p, 1) + p.norm(3),
        lambda p: p.norm(math.inf) + p.max() - p.amin(),
        lambda p: p.std() * p.sum(),
        lambda p: torch.tanh(p).mul(torch.ones(p.shape)).sum(),
        lambda p: F.gelu(p).sum() + F.silu(p).mean() + (p - p.detach() * 0.5).square().mean(),
        lambda p: (p.sum(dim=tuple(range(p.dim())), keepdim=True) * 2).sum(),
        lambda p: (p.exp() * 2).mul_(2).sum(),
        lambda p: p.pow(2).sum() * p.norm(),
    ]
    for name in ("matrix", "scalar", "vector", "image", "one"):
        for loss in losses:
            q = values()[name].requires_grad_()
            if name in ("scalar", "one") and loss is losses[7]:
                continue
            p = nn.Parameter(sharded(values(), rank, world_size)[name])
            for _ in range(2):  # the second time adds to the gradient
                result, expected = loss(p), loss(q)
                same(result.detach(), expected.detach())
                result.backward()
                expected.backward()
            assert type(p.grad) is ShardTensor
            same(p.grad, q.grad)
            p.grad.mul_(2)


@ranks(2)
def test_derivatives_of_derivatives(rank, world_size):
    p = nn.Parameter(sharded(values(), rank, world_size)["matrix"])
    q = values()["matrix"].requires_grad_()
    for t in (p, q):
        (grad,) = torch.autograd.grad(t.pow(3).sum(), [t], create_graph=True)
        (grad.pow(2).sum() + grad.sum()).backward()
    same(p.grad, q.grad)


@ranks(2)
def test_a_tensor_changed_before_backward_is_noticed(rank, world_size):
    p = nn.Parameter(sharded(values(), rank, world_size)["matrix"])
    loss = p.pow(2).sum()
    with torch.no_grad():
        p.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    with pytest.raises(RuntimeError, match="leaf Variable that requires grad"):
        p.mul_(2)


@ranks(2, 3)
def test_assignments_to_data_and_grad_shard_full_tensors(rank, world_size):
    for name in SHAPES:
        shards, other = sharded(values(), rank, world_size), values(seed=4)
        p = nn.Parameter(shards[name])
        local = p.to_local()
        p.data = other[name]
        same(p.detach(), other[name])
        p.data = shards[name] * 2
        assert p.to_local() is local
        p.data.mul_(3)
        same(p.detach(), other[name] * 6)
        p.grad = other[name]
        assert type(p.grad) is ShardTensor and p.grad.shape == p.shape
        same(p.grad, other[name])
        p.grad = p.grad * 2
        same(p.grad, other[name] * 2)
        p.grad = None
        assert p.grad is None
    for value in (torch.ones(3, 3), shards["cube"], torch.ones(4, 3, 3, 3, dtype=torch.float64)):
        with pytest.raises(NeedsGatherError, match="sharded image"):
            p.data = value
    for value in (torch.ones(3, 3), shards["cube"]):
        with pytest.raises(NeedsGatherError, match=r"\.grad of the sharded image"):
            p.grad = value
    assert not p.data.requires_grad and p.detach().to_local() is p.to_local()


@ranks(2)
def test_torch_optimizers_step_on_shard_tensors_as_on_plain(rank, world_size):
    for kind, make in OPTIMIZERS.items():
        reference = {name: nn.Parameter(t) for name, t in values().items()}
        parameters = {name: nn.Parameter(t) for name, t in sharded(values(), rank, world_size).items()}
        plain, shard = make(reference.values()), make(parameters.values())
        for step in range(3):
            for name, grad in values(seed=10 + step).items():
                reference[name].grad = grad
                parameters[name].grad = grad.clone()
            plain.step()
            shard.step()
            shard.zero_grad(set_to_none=step % 2 == 0)
        for name in SHAPES:
            same(parameters[name].detach(), reference[name].detach())
            for key, value in plain.state[reference[name]].items():
                found = shard.state[parameters[name]][key]
                if isinstance(value, torch.Tensor) and value.dim():
                    assert type(found) is ShardTensor, (kind, key)
                    same(found, value)
