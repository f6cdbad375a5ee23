"""Mixed precision gives the numbers of a low-precision copy of masters, to the bit."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torch_shard
from tests.compat.harness import average_grads
from tests.precision.harness import MLP, Mixed, batch, loss_of, low_copy, mean_over_ranks, same_bits
from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from torch_shard import Precision

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


def close(actual: Any, expected: Any, what: str) -> None:
    """As near as sums in bf16 leave them, whose parts are larger than their result."""
    actual = actual.detach().full_tensor()
    torch.testing.assert_close(actual, expected.detach(), rtol=2**-6, atol=2e-3, msg=lambda text: f"{what}: {text}")


@ranks(2, exhaustive=(3, 1, 4))
@pytest.mark.parametrize("strategy", ["full_shard", *exhaustive("shard_grad_op")])
@pytest.mark.parametrize(("stored", "compute"), [(FP32, BF16), *exhaustive((FP64, FP32), (FP64, BF16))])
def test_it_trains_like_a_low_precision_copy_of_masters(stored, compute, strategy, rank):
    Mixed(MLP, Precision(param_dtype=compute), stored=stored, strategy=strategy).train(rank)


@ranks(2, exhaustive=(1, 3))
@pytest.mark.parametrize("settings", [{"keep": [nn.LayerNorm]}, {"reduce_dtype": FP32}, *exhaustive({})], ids=str)
@pytest.mark.parametrize("strategy", ["full_shard", "no_shard", *exhaustive("shard_grad_op", "shard_optim")])
def test_with_other_settings_it_trains_like_a_low_precision_copy_too(settings, strategy, rank):
    # Under no_shard the backend sums, in the dtype of the reduction.
    same = close if strategy == "no_shard" else same_bits
    Mixed(MLP, Precision(param_dtype=BF16, **settings), strategy=strategy).train(rank, same=same)


@ranks(2)
def test_adamw_keeps_its_state_in_the_dtype_of_storage(rank):
    pair = Mixed(MLP, Precision(param_dtype=BF16), optimizer=lambda m: torch.optim.AdamW(m.parameters(), lr=1e-3))
    # Its kernel rounds runs of many parameters otherwise than single ones.
    pair.backward(batch(rank, 0).float())
    pair.check_grads()
    pair.update()
    pair.check(
        lambda a, b, what: torch.testing.assert_close(a.detach().full_tensor(), b.detach(), rtol=1e-6, atol=1e-7)
    )
    state = [v for entries in pair.optimizer.state.values() for v in entries.values() if v.dim()]
    assert state and {v.dtype for v in state} == {FP32}


@ranks(2, exhaustive=(1,))
@pytest.mark.parametrize("compute", [BF16, *exhaustive(FP16)])
def test_micro_batches_are_accumulated_in_fp32(compute, rank, world_size):
    """Under no_sync(), with what is reduced in low precision rounded once."""
    pair = Mixed(MLP, Precision(param_dtype=compute))
    low = pair.low()
    sums: dict[str, torch.Tensor] = {}
    for step in range(3):
        x = batch(rank, step).float()
        if step < 2:
            with pair.engine.no_sync():
                loss_of(pair.model(x)).backward()
        else:
            loss_of(pair.model(x)).backward()
        low.zero_grad()
        loss_of(low(x.to(compute))).backward()
        for name, p in low.named_parameters():
            part = p.grad.float() / world_size
            sums[name] = part if name not in sums else sums[name] + part
    for name, p in pair.model.named_parameters():
        if world_size == 1:
            same_bits(p.grad, sums[name], name)
            continue
        sent = sums[name].to(compute)
        parts = [torch.empty_like(sent) for _ in range(world_size)]
        dist.all_gather(parts, sent)
        total = sum(part.float() for part in parts)
        same_bits(p.grad, total, name)


@ranks(2)
def test_gradients_of_several_backwards_are_added_in_the_dtype_of_storage(rank):
    pair = Mixed(MLP, Precision(param_dtype=BF16))
    for step in range(3):
        pair.backward(batch(rank, step).float())
    pair.check_grads()


@ranks(2)
def test_a_low_precision_model_may_have_fp32_masters(rank):
    torch.manual_seed(0)
    model = MLP().to(BF16)
    masters = copy.deepcopy(model).float()
    engine = torch_shard.shard(model, unit_bytes=300, precision=Precision(master_dtype=FP32))
    optimizers = [torch.optim.SGD(m.parameters(), lr=1e-3) for m in (model, masters)]
    assert {p.dtype for p in model.parameters()} == {FP32}
    for step in range(3):
        x = batch(rank, step).to(BF16)
        out = model(x.float())  # inputs are cast to what the model computes in
        assert out.dtype == BF16
        loss_of(out).backward()
        low = low_copy(masters, BF16)
        loss_of(low(x)).backward()
        for (name, p), q, ours in zip(masters.named_parameters(), low.parameters(), model.parameters(), strict=True):
            p.grad = mean_over_ranks(q.grad, FP32, BF16)
            same_bits(ours.grad, p.grad, name)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for ours, (name, p) in zip(model.parameters(), masters.named_parameters(), strict=True):
        same_bits(ours, p, name)
    engine.close()


@ranks(2)
def test_a_low_precision_model_without_masters_stays_one(rank):
    torch.manual_seed(0)
    model = MLP().to(BF16)
    plain = copy.deepcopy(model)
    torch_shard.shard(model, unit_bytes=300)
    for step in range(2):
        for m in (model, plain):
            loss_of(m(batch(rank, step).to(BF16))).backward()
        average_grads(plain)
        for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
            assert p.grad.dtype == BF16
            close(p.grad, q.grad, name)


@ranks(2, exhaustive=(3,))
def test_half_the_bytes_are_sent(rank):
    sent = []
    for precision in (None, BF16):
        torch.manual_seed(0)
        model = MLP(width=64)
        engine = torch_shard.shard(model, unit_bytes=20000, precision=precision)
        before = engine.bytes_sent
        for step in range(2):
            loss_of(model(batch(rank, step).float())).backward()
        sent.append(engine.bytes_sent - before)
    assert sent[1] == pytest.approx(sent[0] / 2, rel=0.01)


@ranks(2)
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.AdamW, *exhaustive(torch.optim.Adagrad)])
def test_optimizers_take_gradients_that_are_kept_in_low_precision(make, rank):
    pair = Mixed(
        MLP,
        Precision(param_dtype=BF16, keep_low_precision_grads=True),
        optimizer=lambda m: make(m.parameters(), lr=0.01),
    )
    pair.backward(batch(rank, 0).float())
    for name, p in pair.model.named_parameters():
        assert p.grad.dtype == BF16
        plain = pair.masters.get_parameter(name)
        plain.grad = plain.grad.to(BF16).float()
        same_bits(p.grad.full_tensor().float(), plain.grad, name)
    pair.optimizer.step()
    pair.plain_optimizer.step()
    pair.check(
        lambda a, b, what: torch.testing.assert_close(a.detach().full_tensor(), b.detach(), rtol=1e-5, atol=1e-6)
    )
    assert {p.grad.dtype for p in pair.model.parameters()} == {BF16}


@ranks(4)
def test_gradients_that_are_reduced_in_a_wider_dtype_than_they_are_stored_in_are_rounded_once(rank):
    model = nn.Linear(1, 1, bias=False).bfloat16()
    torch_shard.shard(model, precision=Precision(reduce_dtype=FP32))
    # Each rank's part of the mean is below half a unit in the last place of 1, but together they are more.
    model(torch.tensor([[4.0 if rank == 0 else 2**-7]], dtype=BF16)).sum().backward()
    assert model.weight.grad.full_tensor().item() == 1 + 2**-7
