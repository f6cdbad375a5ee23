"""ShardTensors as parameters: gradients, assignments, and the optimizers of torch."""

import math

import pytest
import torch
from torch import nn

from tests.support.ranks import ranks
from tests.support.shard_helpers import SHAPES, same, sharded, values
from torch_shard.errors import NeedsGatherError
from torch_shard.shard_tensor.tensor import ShardTensor

F = nn.functional


@ranks(2)
def test_it_takes_a_parameters_place(rank, world_size):
    layer = nn.Linear(7, 5)
    weight, before = layer.weight, layer.weight.detach().clone()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    shard = sharded({"weight": before}, rank, world_size)["weight"]
    torch.utils.swap_tensors(weight, nn.Parameter(shard))
    assert layer.weight is weight is optimizer.param_groups[0]["params"][0]
    assert isinstance(weight, nn.Parameter) and isinstance(weight, ShardTensor)
    assert weight.shape == (5, 7) and weight.ndim == 2 and weight.numel() == 35 and weight.requires_grad
    assert dict(layer.named_parameters())["weight"] is weight
    assert weight.is_leaf and weight.grad is None and len(weight) == 5 and weight.dtype == torch.float32
    same(layer.state_dict()["weight"], before)
    # Conversions that change nothing are allowed; others would leave the unit behind.
    assert layer.to("cpu").weight is weight and weight.to_local() is shard.to_local()
    for convert in (layer.half, layer.double, lambda: layer.to(torch.bfloat16)):
        with pytest.raises(NeedsGatherError, match="sharded weight"):
            convert()
    layer.load_state_dict({"weight": before * 2, "bias": layer.bias.detach()})
    same(weight.detach(), before * 2)


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


@ranks(2, 3)
def test_what_is_computed_from_a_parameter_can_be_used_in_full(rank, world_size):
    # Each rank has data of its own; gradients are averaged, as DDP averages them.
    inputs = [torch.randn(2, 7, generator=torch.Generator().manual_seed(r)) for r in range(world_size)]
    mask = torch.arange(7) % 2
    p = nn.Parameter(sharded(values(), rank, world_size)["matrix"])
    q = values()["matrix"].requires_grad_()
    F.linear(inputs[rank], p * mask).pow(2).sum().backward()
    sum(F.linear(x, q * mask).pow(2).sum() for x in inputs).div(world_size).backward()
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


OPTIMIZERS = [
    (torch.optim.AdamW, {"foreach": False}),
    (torch.optim.AdamW, {"foreach": True, "amsgrad": True}),
    (torch.optim.AdamW, {"fused": True}),
    (torch.optim.Adam, {"fused": True, "amsgrad": True}),
    (torch.optim.Adam, {"weight_decay": 0.1, "maximize": True}),
    (torch.optim.SGD, {"momentum": 0.9, "nesterov": True}),
    (torch.optim.SGD, {"momentum": 0.9, "fused": True}),
    (torch.optim.SGD, {"momentum": 0.5, "foreach": True, "weight_decay": 0.1}),
    (torch.optim.Adagrad, {"initial_accumulator_value": 0.1}),
    (torch.optim.Adagrad, {"fused": True}),
    (torch.optim.Adagrad, {"foreach": True}),
    (torch.optim.RMSprop, {"momentum": 0.9, "centered": True}),
    (torch.optim.RMSprop, {"foreach": True}),
    (torch.optim.Adadelta, {}),
    (torch.optim.Adamax, {}),
    (torch.optim.NAdam, {}),
    (torch.optim.RAdam, {}),
    (torch.optim.ASGD, {}),
    (torch.optim.Rprop, {}),
]


@ranks(2)
def test_torch_optimizers_step_on_shard_tensors_as_on_plain(rank, world_size):
    for kind, options in OPTIMIZERS:
        reference = {name: nn.Parameter(t) for name, t in values().items()}
        parameters = {name: nn.Parameter(t) for name, t in sharded(values(), rank, world_size).items()}
        plain = kind(reference.values(), lr=0.05, **options)
        shard = kind(parameters.values(), lr=0.05, **options)
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
