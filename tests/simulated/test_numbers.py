"""What an accelerator's way computes is what plain training computes."""

from __future__ import annotations

import contextlib
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import torch_shard
from tests.simulated import simulation
from tests.simulated.modes import ACCELERATOR
from tests.simulated.programs import ROWS, WIDTH, Model
from tests.simulated.simulation import group, simulated
from tests.support.inside import runtime_of
from tests.support.marks import exhaustive, quick
from tests.support.ranks import ranks
from torch_shard.comm import collectives

STEPS = 3
BF16 = torch_shard.Precision(torch.bfloat16, torch.float32)
FP16 = torch_shard.Precision(None, torch.float16)

CASES = {
    "fp32": {},
    "replicated": {"strategy": "no_shard"},
    "in bf16": {"precision": BF16},
    "summed in fp16": {"precision": FP16},
    "quantized": {"quantized": torch_shard.Quantized("int8", "int8", min_size=1, block=16)},
}
# Of SGD with a learning rate of 0.1, after three steps.
TOLERANCES = {"in bf16": 2e-3, "summed in fp16": 1e-4, "quantized": 5e-3}


class Reused(torch.autograd.Function):
    """Adds a product of two parameters, and gives their gradients in memory that it uses again for the next call."""

    memory: torch.Tensor | None = None

    @staticmethod
    def forward(ctx, x, weight, bias):
        return x / 2 + weight * bias

    @staticmethod
    def backward(ctx, grad):
        grads = torch.stack([grad.sum(0), 2 * grad.sum(0)])
        if Reused.memory is not None:
            grads = Reused.memory.copy_(grads)
        return grad / 2, grads[0], grads[1]


class Reusing(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)
        self.pairs = nn.ParameterList(torch.randn(WIDTH) for _ in range(4))

    def forward(self, x):
        x = self.first(x)
        for weight, bias in zip(self.pairs[::2], self.pairs[1::2], strict=True):
            x = Reused.apply(x, weight, bias)
        return self.last(x)


class Adapted(Model):
    """Frozen and trainable parameters in each block, as with LoRA."""

    def __init__(self):
        super().__init__()
        for name, param in self.named_parameters():
            param.requires_grad = "down" in name


def train(model, rank, engine=None, accumulate=1):
    """Train with batches that differ between ranks and steps."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    data = torch.Generator().manual_seed(rank)
    device = torch.device("cpu") if engine is None else ACCELERATOR
    for _ in range(STEPS):
        for micro in range(accumulate):
            x = torch.randn(ROWS, WIDTH, generator=data).to(device)
            waits = micro + 1 < accumulate
            with (engine or model).no_sync() if waits else contextlib.nullcontext():
                model(x).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def difference(make, config, rank, accumulate=1):
    """Return the largest difference of a parameter from DDP's, after training both, and the number of collectives that gather."""
    torch.manual_seed(0)
    plain = make()
    torch.manual_seed(0)
    over = group()
    with simulated("late"):
        with ACCELERATOR:
            model = make()
            Reused.memory = torch.empty(2, WIDTH)
        engine = torch_shard.shard(model, torch_shard.ShardConfig(**config), mesh=over)
        train(model, rank, engine, accumulate)
        gathers = runtime_of(engine).collectives.gather_channel.issued
        found = {name: p.full_tensor().detach().cpu() for name, p in model.named_parameters()}
    Reused.memory = None  # DDP itself would take the memory for the gradients
    train(DistributedDataParallel(plain), rank, accumulate=accumulate)
    return max((found[name] - p.detach()).abs().max().item() for name, p in plain.named_parameters()), gathers


@pytest.mark.parametrize("name", quick(CASES, ["fp32"]))
@ranks(2)
def test_training_is_like_under_ddp(rank, name):
    assert difference(Model, CASES[name], rank)[0] <= TOLERANCES.get(name, 1e-6)


@ranks(2)
def test_training_is_like_under_ddp_if_the_host_waits_for_the_devices_collectives(rank):
    """As over Gloo, for which an engine makes no streams, although the device has some."""
    torch.manual_seed(0)
    plain = Model()
    torch.manual_seed(0)
    over_gloo = mock.patch.object(simulation, "group", return_value=dist.group.WORLD)
    unlike_nccl = mock.patch.object(collectives, "like_nccl", return_value=False)
    with over_gloo, simulated("late") as world, unlike_nccl:
        with ACCELERATOR:
            model = Model()
        engine = torch_shard.shard(model)
        train(model, rank, engine)
        found = {name: p.full_tensor().detach().cpu() for name, p in model.named_parameters()}
    assert not world.memory.races
    train(DistributedDataParallel(plain), rank)
    for name, p in plain.named_parameters():
        torch.testing.assert_close(found[name], p.detach(), rtol=0, atol=1e-6, msg=name)


@ranks(2)
def test_accumulated_training_is_like_under_ddp(rank):
    assert difference(Model, {}, rank, accumulate=3)[0] <= 1e-6


@pytest.mark.parametrize("precision", [None, *exhaustive(BF16)])
@ranks(2)
def test_frozen_and_trainable_parameters_of_a_unit_are_gathered_by_one_collective(rank, precision):
    config = {} if precision is None else {"precision": precision}
    found, gathers = difference(Adapted, config, rank)
    assert found <= (1e-6 if precision is None else 2e-3)
    assert (
        gathers <= difference(Model, config, rank)[1]
    )  # backward needs no frozen unit in front of the first trainable one


@pytest.mark.exhaustive
@ranks(4)
def test_training_of_replicas_is_like_under_ddp(rank):
    assert difference(Model, {"strategy": "hybrid_shard", "shard_size": 2}, rank)[0] <= 1e-6


@ranks(2)
def test_a_gradient_whose_memory_is_used_again_is_copied_before(rank):
    assert difference(Reusing, {}, rank)[0] <= 1e-6
