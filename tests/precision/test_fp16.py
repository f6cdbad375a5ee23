"""fp16: sums that do not overflow, and a loss scaler whose decisions are the same on all ranks."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torch_shard
from tests.precision.harness import MLP, Mixed, batch, loss_of, same_bits
from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from torch_shard import Precision
from torch_shard.unit.gradient_buffer import divided_before

FP16, FP32 = torch.float16, torch.float32
LOW = Precision(param_dtype=FP16)


@pytest.mark.parametrize("world", [1, 2, 3, 4, 6, 8, 12, 64, 100, 1024])
def test_half_of_the_division_comes_before_the_sum(world):
    before = divided_before(world)
    assert before & (before - 1) == 0
    assert before**2 >= world and (before == 1 or (before // 2) ** 2 < world)


class Factor(nn.Module):
    def __init__(self, value: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.full((40,), value))

    def forward(self, x):
        return (self.weight * x).sum()


@ranks(2, 4, exhaustive=(3,))
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard"])
def test_the_mean_of_large_gradients_is_finite(strategy, rank, world_size):
    """Their sum is not."""
    model = Factor()
    torch_shard.shard(model, strategy=strategy, precision=LOW)
    model(torch.full((40,), 30000.0)).backward()
    assert 30000.0 * world_size > torch.finfo(FP16).max * 0.9
    torch.testing.assert_close(model.weight.grad.full_tensor(), torch.full((40,), 30000.0), rtol=1e-3, atol=0)


@ranks(4)
def test_the_mean_of_small_gradients_is_not_zero(rank):
    """A quarter of them is."""
    model = Factor()
    torch_shard.shard(model, precision=LOW)
    tiny = 2.0**-24  # the smallest number of fp16
    model(torch.full((40,), 2 * tiny)).backward()
    assert torch.full((1,), 2 * tiny).div(4).half().item() == 0.0
    same_bits(model.weight.grad, torch.full((40,), 2 * tiny))


@ranks(2, exhaustive=(3,))
@pytest.mark.parametrize("strategy", ["full_shard", *exhaustive("no_shard")])
def test_an_overflow_on_one_rank_skips_the_step_on_all(strategy, rank, world_size):
    pair = Mixed(MLP, LOW, strategy=strategy)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
    steps = []
    for step in range(4):
        before = [p.detach().full_tensor() for p in pair.model.parameters()]
        loss = loss_of(pair.model(batch(rank, step).float())) * (1e9 if step == 1 and rank == 0 else 1.0)
        scaler.scale(loss.float()).backward()
        scaler.step(pair.optimizer)
        scaler.update()
        pair.optimizer.zero_grad()
        after = [p.detach().full_tensor() for p in pair.model.parameters()]
        steps.append(not all(map(torch.equal, before, after)))
    assert steps == [True, False, True, True]
    scales = torch.empty(world_size)
    dist.all_gather_into_tensor(scales, torch.tensor([scaler.get_scale()]))
    assert scales.tolist() == [2.0**10] * world_size  # halved once and doubled once


@ranks(2)
def test_a_scaled_step_equals_one_in_fp32_but_for_rounding(rank):
    torch.manual_seed(0)
    model, plain = Factor(0.5), Factor(0.5)
    torch_shard.shard(model, precision=LOW)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    x = torch.arange(40.0) / 64  # exact in fp16, and so is everything that follows
    scaler.scale(model(x).float()).backward()
    scaler.unscale_(optimizers[0])
    same_bits(model.weight.grad, x)
    scaler.step(optimizers[0])
    plain(x).backward()
    optimizers[1].step()
    same_bits(model.weight, plain.weight)
