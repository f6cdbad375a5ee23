"""Steps of bf16 parameters are those of fp32 but for the last rounding, and never silently in bf16."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import torch_shard
from tests.compat.harness import MLP, batch, loss_of, whole
from tests.precision.harness import same_bits
from tests.precision.rounding_harness import (
    BF16,
    FP32,
    ROUND,
    Exact,
    Flat,
    O,
    Whole2D,
    _of_kind,
    adamw,
    neighbours,
    same_values,
    sgd,
    small_steps,
    train,
    wholes,
)
from tests.support.marks import exhaustive, quick
from tests.support.ranks import ranks
from torch_shard import Precision
from torch_shard.optim.elementwise.piece import RoundedPiece

# -- steps ------------------------------------------------------------------------------------------------------------


@ranks(2, exhaustive=(1,))
@pytest.mark.parametrize("strategy", ["full_shard", *exhaustive("shard_grad_op", "shard_optim", "no_shard")])
def test_updates_far_below_the_resolution_add_up(strategy, rank):
    """20 steps of 1e-4 from 1, where the next values are 0.004 below and 0.008 above."""
    steps, lr, n = 20, 1e-4, 40000
    sgd = functools.partial(O.SGD, lr=lr)
    found = small_steps(n, steps, ROUND, sgd, strategy=strategy).double()
    ulp = 2**-8
    sd = ulp * (steps * lr / ulp / n) ** 0.5  # a binomial's, at most
    assert abs(found.mean().item() - (1 - steps * lr)) < 5 * sd
    assert 0.3 < (found < 1).double().mean() < 0.7
    nearest = small_steps(n, steps, None, sgd, strategy=strategy)
    assert (nearest == 1).all()


MAKE: dict[str, Callable[[nn.Module], Any]] = {
    "SGD": sgd,
    "AdamW": adamw,
    "AdamW foreach": lambda m: O.AdamW(m.parameters(), lr=1e-3, foreach=True),
    "AdamW for-loop": lambda m: O.AdamW(m.parameters(), lr=1e-3, foreach=False, fused=False),
    "Adam fused": lambda m: O.Adam(m.parameters(), lr=1e-3, fused=True),
    "Adagrad": lambda m: O.Adagrad(m.parameters(), lr=1e-3),
    "NAdam": lambda m: O.NAdam(m.parameters(), lr=1e-3),
    "Rprop": lambda m: O.Rprop(m.parameters(), lr=1e-3),
    "ASGD": lambda m: O.ASGD(m.parameters(), lr=1e-3),
    "Adadelta": lambda m: O.Adadelta(m.parameters(), lr=1e-1),
}


@ranks(3)
@pytest.mark.parametrize("strategy", ["full_shard", *exhaustive("shard_grad_op", "shard_optim", "no_shard")])
@pytest.mark.parametrize("name", quick(MAKE, ["AdamW"]))
def test_steps_are_those_of_fp32_but_for_the_last_rounding(name, strategy, rank):
    model, _, optimizer = train(rank, MAKE[name], 0, strategy=strategy)
    exact = Exact(model, MAKE[name])
    before = wholes(model)
    for step in range(4):
        loss_of(model(batch(rank, step).to(BF16))).backward()
        exact.step(optimizer)
        optimizer.zero_grad()
    assert not same_values(wholes(model), before)


@ranks(2, exhaustive=(1, 3))
@pytest.mark.parametrize("kind", [O.Muon, *exhaustive(O.Adafactor)])
def test_optimizers_of_whole_matrices_step_in_fp32_too(kind, rank):
    make = functools.partial(_of_kind, kind)
    model, engine, optimizer = train(rank, make, 0, build=lambda: Whole2D().to(BF16))
    before = wholes(model)
    for step in range(3):
        loss_of(model(batch(rank, step).to(BF16))).backward()
        grads = {name: whole(p.grad) for name, p in model.named_parameters()}
        plain = {name: value.float().requires_grad_() for name, value in wholes(model).items()}
        # State lives at the owners, and is compared as a whole.
        reference = kind(list(plain.values()), lr=1e-2)
        state = engine.optim_state_dict(optimizer, rank0_only=False)
        for name, p in plain.items():
            p.grad = grads[name].float()
            if name in state["state"]:
                reference.state[p] = {k: copy.deepcopy(v) for k, v in state["state"][name].items()}
        reference.step()
        optimizer.step()
        optimizer.zero_grad()
        after = engine.optim_state_dict(optimizer, rank0_only=False)["state"]
        for name, p in model.named_parameters():
            low, high = neighbours(plain[name].detach())
            found = whole(p).float()
            assert ((found == low) | (found == high)).all(), name
            for key, value in reference.state[plain[name]].items():
                same_bits(after[name][key], value, f"{key} of {name}")
    assert not same_values(wholes(model), before)


# -- masters, declared classes, memory --------------------------------------------------------------------------------


@pytest.mark.exhaustive
@ranks(2)
@pytest.mark.parametrize("compute", [*exhaustive(None), BF16])
def test_fp32_models_may_have_bf16_masters(compute, rank):
    """Computed with in fp32 or as they are stored."""
    precision = Precision(master_dtype=BF16, param_dtype=compute, stochastic_rounding=True)
    model, _, optimizer = train(rank, adamw, 0, build=lambda: MLP(width=11), precision=precision)
    exact = Exact(model, adamw)
    for step in range(3):
        loss_of(model(batch(rank, step).to(compute or FP32))).backward()
        exact.step(optimizer)
        optimizer.zero_grad()


@ranks(2)
def test_gradients_may_come_to_the_step_in_fp32(rank, world_size):
    """As they were reduced: what bf16 would round away counts."""
    precision = Precision(reduce_dtype=FP32, keep_low_precision_grads=True, stochastic_rounding=True)
    model = Flat(64)
    torch_shard.shard(model, precision=precision)
    optimizer = O.SGD(model.parameters(), lr=1.0, momentum=0.9)
    ((1 + 2.0**-6 * rank) * model()).backward()  # mean 1 + 2**-7, and in bf16 sums are rounded
    ((2.0**-10) * model()).backward()
    exact = 1 + 2**-7 + 2**-10
    assert model.weight.grad.dtype == FP32 and (whole(model.weight.grad) == exact).all()
    optimizer.step()
    assert (whole(optimizer.state[model.weight]["momentum_buffer"]) == exact).all()


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.low, self.high = nn.Linear(5, 7, dtype=BF16), nn.Linear(7, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.high(self.low(x.to(BF16)).float())


@ranks(2)
def test_parameters_in_fp32_step_as_without_rounding(rank):
    torch.manual_seed(0)
    model = Two()
    torch_shard.shard(model, precision=ROUND)
    optimizer = adamw(model)
    plain = {n: nn.Parameter(whole(p)) for n, p in model.high.named_parameters()}
    reference = O.AdamW(plain.values(), lr=1e-3)
    for step in range(3):
        loss_of(model(batch(rank, step))).backward()
        for name, p in plain.items():
            p.grad = whole(model.high.get_parameter(name).grad)
        optimizer.step()
        reference.step()
        optimizer.zero_grad()
        for name, p in plain.items():
            torch.testing.assert_close(whole(model.high.get_parameter(name)), p.detach(), rtol=1e-6, atol=1e-7)
    assert model.low.weight.dtype == BF16 and optimizer.state[model.low.weight]["exp_avg"].dtype == FP32


class Halving(O.Optimizer):
    """SGD of a user's own, in two loops, which takes the gradient away."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = None if closure is None else torch.enable_grad()(closure)()
        held = [(p, group) for group in self.param_groups for p in group["params"] if p.grad is not None]
        for p, group in held:
            assert p.dtype == p.grad.dtype == FP32
            p.add_(p.grad, alpha=-group["lr"] / 2)
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.add_(p.grad, alpha=-group["lr"] / 2)
                    p.grad.mul_(2)
        return loss


@ranks(2)
def test_declared_classes_find_fp32_and_round_once(rank):
    """Once for the whole step: halves of an update that bf16 has give exactly that update."""
    torch_shard.optim.register(Halving, kind="elementwise")
    model = Flat(1000)
    torch_shard.shard(model, precision=ROUND)
    optimizer = Halving(model.parameters(), lr=2**-8)
    model().backward()
    optimizer.step()
    assert (whole(model.weight) == 1 - 2**-8).all()
    assert (whole(model.weight.grad) == 2).all() and model.weight.grad.dtype == BF16
    optimizer.zero_grad()

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model()
        loss.backward()
        return loss

    optimizer.step(closure)
    assert (whole(model.weight) == 1 - 2**-7).all()


@ranks(2)
def test_only_a_part_of_the_shard_is_in_fp32_at_a_time(rank):
    """No more than a million elements on the CPU, whatever the model's size."""
    model = nn.Sequential(*[nn.Linear(1500, 1500, bias=False) for _ in range(4)]).to(BF16)
    torch_shard.shard(model, units=["0", "1", "2", "3"], precision=ROUND)
    entered: dict[int, int] = {}
    most = [0, 0]
    enter, drop = RoundedPiece.load, RoundedPiece.drop

    def entering(piece: RoundedPiece) -> None:
        enter(piece)
        entered[id(piece)] = piece.param.numel()
        most[0] = max(most[0], sum(entered.values()))

    def dropping(piece: RoundedPiece) -> None:
        most[1] += entered.pop(id(piece), 0)
        drop(piece)
        assert piece.param.untyped_storage().nbytes() == 4 and piece.param.grad is None

    RoundedPiece.load, RoundedPiece.drop = entering, dropping  # type: ignore[method-assign]
    try:
        for make in (adamw, lambda m: O.AdamW(m.parameters(), foreach=True), lambda m: O.NAdam(m.parameters())):
            most[:] = [0, 0]
            go_once(model, make(model))
            assert 0 < most[0] <= 1 << 20 and most[1] == 4 * 1500 * 1500 // 2 and not entered
    finally:
        RoundedPiece.load, RoundedPiece.drop = enter, drop  # type: ignore[method-assign]


def go_once(model: nn.Module, optimizer: Any) -> None:
    model(torch.ones(1, 1500, dtype=BF16)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


@ranks(2)
def test_closing_gives_bf16_parameters_back(rank):
    model, engine, optimizer = train(rank, adamw)
    values = wholes(model)
    engine.close(optimizer)
    assert {p.dtype for p in model.parameters()} == {BF16} and same_values(wholes(model), values)
