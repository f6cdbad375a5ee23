"""Gradients that are reduced as 8-bit codes, with error feedback and without."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torch_shard
from tests.compat.harness import MLP, loss_of, plain_backward
from tests.precision.harness import same_bits
from tests.quantized.harness import (
    BF16,
    BOTH,
    FP16,
    FP32,
    GRADIENTS,
    PARAMETERS,
    SHARDED,
    SMALL,
    Reduced,
    decoded,
    inputs,
    is_quantized,
    laid_out,
    layouts,
    picked,
    sharded,
)
from tests.support.inside import runtime_of
from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from torch_shard import Precision, Quantized
from torch_shard.errors import ConfigError


def train_like_the_reference(rank: int, model: nn.Module, plain: nn.Module, reduced: Reduced, steps: int = 4) -> None:
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    for step in range(steps):
        for each in (model, plain):
            plain_backward(each, inputs(rank, step))
        for name, grad in reduced(plain).items():
            same_bits(model.get_parameter(name).grad, grad, f"step {step}, {name}.grad")
            plain.get_parameter(name).grad = grad
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        same_bits(p, q, name)


@ranks(2, exhaustive=(3, 4))
@pytest.mark.parametrize("feedback", [True, *exhaustive(False)])
@pytest.mark.parametrize("strategy", SHARDED)
def test_gradients_are_the_references(strategy, feedback, rank):
    quantized = Quantized(gradients="int8", error_feedback=feedback, **SMALL)
    model, plain, engine = sharded(quantized, strategy=strategy)
    train_like_the_reference(rank, model, plain, Reduced(engine, feedback))


@pytest.mark.exhaustive
@ranks(2)
def test_micro_batches_are_quantized_once(rank):
    model, plain, engine = sharded(GRADIENTS)
    reduced = Reduced(engine)
    for step in range(2):
        sums: dict[str, torch.Tensor] = {}
        for part in range(3):
            x = inputs(rank, 10 * step + part)
            if part < 2:
                with engine.no_sync():
                    plain_backward(model, x)
            else:
                plain_backward(model, x)
            plain.zero_grad()
            plain_backward(plain, x)
            for name, p in plain.named_parameters():  # halves are exact, so that adding them is alike
                sums[name] = p.grad.clone() if part == 0 else sums[name] + p.grad
        for name, p in plain.named_parameters():
            p.grad = sums[name]
        for name, grad in reduced(plain).items():
            same_bits(model.get_parameter(name).grad, grad, name)
        model.zero_grad()


class Branches(nn.Module):
    """Two layers of one unit, of which a forward may leave one out."""

    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Linear(5, 16, bias=False), nn.Linear(5, 16, bias=False)
        self.used = ("left", "right")

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return sum(getattr(self, name)(x) for name in self.used)


@ranks(2)
def test_what_lacks_a_gradient_keeps_what_it_has_lost_until_it_has_one(rank):
    """Of a parameter that no rank has a gradient for, nobody takes what is sent."""
    model, plain, engine = sharded(GRADIENTS, Branches, units=[["left.weight", "right.weight"]])
    (layout,) = layouts(engine)
    lost: dict[int, torch.Tensor] = {}
    both, left = ("left", "right"), ("left",)
    for step, used in enumerate([(both, both), (left, left), (both, left), (both, both)]):
        everyone: list[Any] = [None, None]
        for each in (model, plain):
            each.used = used[rank]
            each(inputs(rank, step)).pow(2).sum().backward()
        mine = {name: p.grad * 0.5 for name, p in plain.named_parameters() if p.grad is not None}
        dist.all_gather_object(everyone, mine)
        total = torch.zeros(layout.numel)
        for r, grads in enumerate(everyone):
            flat = laid_out(layout, grads)
            has = laid_out(layout, {name: torch.ones_like(grad) for name, grad in grads.items()}).bool()
            before = lost.get(r, torch.zeros(layout.numel, dtype=BF16))
            whole = torch.where(has, flat + before, 0.0)
            sent = torch.cat([decoded(row) for row in whole.view(2, -1)])
            lost[r] = torch.where(has, (whole - sent).to(BF16), before)
            total += sent
        for name, grad in picked(layout, total).items():
            ours = model.get_parameter(name).grad
            if name.startswith("right") and used == (left, left):
                assert ours is None
            else:
                same_bits(ours, grad, f"step {step}, {name}")
        model.zero_grad()
        plain.zero_grad()


@ranks(2)
@pytest.mark.parametrize("bad", [math.nan, *exhaustive(math.inf)])
def test_a_gradient_that_is_not_finite_shows_everywhere_and_does_not_stay(bad, rank):
    model, plain, engine = sharded(GRADIENTS)
    plain_backward(model, inputs(rank, 0))
    model.zero_grad()
    x = inputs(rank, 1)
    if rank == 1:
        x[0, 0] = bad
    plain_backward(model, x)
    norm = engine.clip_grad_norm_(1.0)
    assert not math.isfinite(float(norm))
    assert not all(torch.isfinite(p.grad.full_tensor()).all() for p in model.parameters() if p.dim() == 2)
    model.zero_grad()
    plain_backward(model, inputs(rank, 2))
    assert math.isfinite(float(engine.clip_grad_norm_(1e9)))
    # What is left of before is less than a step of the code.
    plain_backward(plain, inputs(rank, 2))
    for name, p in plain.named_parameters():
        dist.all_reduce(p.grad)
        torch.testing.assert_close(
            model.get_parameter(name).grad.full_tensor(),
            p.grad / 2,
            rtol=0,
            atol=0.05 * float(p.grad.abs().max()) + 0.05,
        )


@ranks(2)
def test_bf16_gradients_are_summed_in_fp32(rank):
    quantized = Quantized(gradients="int8", error_feedback=False, **SMALL)
    model, plain, engine = sharded(quantized, precision=Precision(BF16))
    low = copy.deepcopy(plain).to(BF16)
    x = inputs(rank, 0)
    loss_of(model(x)).backward()
    loss_of(low(x.to(BF16))).backward()
    mine = {name: (p.grad * 0.5).float() for name, p in low.named_parameters()}
    everyone: list[Any] = [None, None]
    dist.all_gather_object(everyone, mine)
    for layout in layouts(engine):
        rows = [laid_out(layout, grads).view(2, -1) for grads in everyone]
        if is_quantized(layout):
            rows = [torch.stack([decoded(part) for part in row]) for row in rows]
        for name, grad in picked(layout, (rows[0] + rows[1]).view(-1)).items():
            assert model.get_parameter(name).grad.dtype == FP32
            same_bits(model.get_parameter(name).grad, grad, name)


def three_steps(model: nn.Module, engine: torch_shard.Engine, rank: int, in_backward: bool) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if in_backward:
        engine.step_in_backward(optimizer)
    for step in range(3):
        plain_backward(model, inputs(rank, step))
        if not in_backward:
            optimizer.step()
            optimizer.zero_grad()


@ranks(2)
def test_stepping_in_backward_gives_the_same_weights(rank):
    found = []
    for in_backward in (False, True):
        model, _, engine = sharded(BOTH)
        three_steps(model, engine, rank, in_backward)
        found.append([p.detach().full_tensor() for p in model.parameters()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        raise ValueError("on all ranks")


@pytest.mark.exhaustive
@ranks(2)
@pytest.mark.parametrize("behind", ["load", *exhaustive("load of a file", "load_state_dict", "deepcopy", "a failure")])
def test_error_feedback_begins_anew(behind, rank, tmp_path):
    model, plain, engine = sharded(GRADIENTS)
    plain_backward(model, inputs(rank, 7))
    model.zero_grad()
    if behind == "load":
        engine.save(tmp_path / "saved")
        engine.load(tmp_path / "saved")
    elif behind == "load of a file":
        engine.save_full(tmp_path / "model.pt")
        dist.barrier()
        engine.load(tmp_path / "model.pt")
    elif behind == "load_state_dict":
        engine.load_state_dict(engine.state_dict(form="full", rank0_only=False))
    elif behind == "deepcopy":
        model = copy.deepcopy(model)
        engine = torch_shard.engine_of(model)
    else:
        with pytest.raises(ValueError, match="on all ranks"):
            model(Fails.apply(inputs(rank, 1).requires_grad_())).sum().backward()
        model.zero_grad()
    train_like_the_reference(rank, model, plain, Reduced(engine), steps=2)


@ranks(2)
def test_what_error_feedback_keeps_is_counted(rank):
    model, _, engine = sharded(GRADIENTS)
    assert engine.memory_summary()["gradients"] == 0
    plain_backward(model, inputs(rank, 0))
    model.zero_grad()
    kept = engine.memory_summary()["gradients"]
    assert kept == 2 * sum(layout.numel for layout in layouts(engine) if is_quantized(layout))


@ranks(2)
def test_every_buffer_that_a_reduction_takes_is_given_back_for_later_ones(rank, monkeypatch):
    model, _, engine = sharded(GRADIENTS)
    collectives, taken, given = runtime_of(engine).collectives, [], []
    take, give = collectives.take, collectives.give
    monkeypatch.setattr(collectives, "take", lambda *key: taken.append(take(*key)) or taken[-1])
    monkeypatch.setattr(collectives, "give", lambda buffer: given.append(buffer) or give(buffer))
    plain_backward(model, inputs(rank, 0))
    assert torch.uint8 in {buffer.dtype for buffer in taken}  # payloads
    assert sorted(map(id, given)) == sorted(map(id, taken))


@ranks(2)
def test_a_communication_hook_beside_it_is_an_error(rank):
    _, _, engine = sharded(GRADIENTS)
    with pytest.raises(ConfigError, match=r"^hook: ShardConfig\.quantized"):
        engine.register_comm_hook(None, lambda state, grad, out: None)
    _, _, engine = sharded(PARAMETERS)
    engine.register_comm_hook(None, lambda state, grad, out: None)


@ranks(2)
def test_error_feedback_and_a_grad_scaler_exclude_each_other(rank):
    precision = Precision(FP16, output_dtype=FP32)
    model, _, _ = sharded(GRADIENTS, precision=precision)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    with pytest.raises(ConfigError, match=r"GradScaler.*error_feedback=False"):
        scaler.scale(loss_of(model(inputs(rank, 0)))).backward()
    loss_of(model(inputs(rank, 0))).backward()
    without = Quantized(gradients="int8", error_feedback=False, **SMALL)
    model, _, _ = sharded(without, precision=precision)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    before = model.head.weight.detach().full_tensor()
    for step, factor in enumerate((1.0, 1e30)):
        optimizer.zero_grad()
        scaler.scale(loss_of(model(inputs(rank, step))) * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        after = model.head.weight.detach().full_tensor()
        # An overflow shows through the codes, and all ranks skip the step.
        assert torch.equal(before, after) == (factor > 1)
        assert after.isfinite().all()
        before = after
    assert scaler.get_scale() == 4.0


@ranks(2)
def test_ranks_with_other_settings_raise_together(rank):
    with pytest.raises(ConfigError, match=r"^quantized differs between the ranks: .*block=16.*block=32"):
        torch_shard.shard(MLP(), quantized=Quantized("int8", block=16 + 16 * rank), timeout=20.0)


def least_squares(rank: int, world_size: int, quantized: Quantized | None, rates: list[float]) -> float:
    """How far from the optimum, in the loss, gradient descent ends on ranks whose data pull in different directions.

    At the optimum the gradients of the ranks cancel, but none of them is zero: without feedback their rounding stays.
    """
    generator = torch.Generator().manual_seed(7 + rank)
    a = torch.randn(64, 24, generator=generator)
    b = torch.randn(64, 8, generator=generator) * 10
    model, _, _ = sharded(quantized, lambda: nn.Linear(24, 8, bias=False))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    for rate in rates:
        optimizer.param_groups[0]["lr"] = rate
        (model(a) - b).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    every = [torch.empty(64, 32) for _ in range(world_size)]
    dist.all_gather(every, torch.cat([a, b], dim=1))
    a, b = torch.cat(every).double().split([24, 8], dim=1)
    best = torch.linalg.lstsq(a, b).solution
    weight = model.weight.detach().full_tensor().double()
    return float((a @ (weight.t() - best)).pow(2).mean())


@pytest.mark.exhaustive
@ranks(2, 3)
def test_error_feedback_reaches_the_optimum_that_rounding_alone_misses(rank, world_size):
    coarse: dict[str, Any] = {"block": 1024, "min_size": 0}
    rates = [1.5 / (1 + step / 30) for step in range(200)]
    exact = least_squares(rank, world_size, None, rates)
    with_it = least_squares(rank, world_size, Quantized(gradients="int8", **coarse), rates)
    without = least_squares(rank, world_size, Quantized(gradients="int8", error_feedback=False, **coarse), rates)
    begin = least_squares(rank, world_size, None, [])
    print(f"excess loss: at first {begin:.3g}, exact {exact:.3g}, with feedback {with_it:.3g}, without {without:.3g}")
    assert exact < 1e-7 * begin
    assert with_it < 2e-7 * begin
    assert without > 100 * with_it
