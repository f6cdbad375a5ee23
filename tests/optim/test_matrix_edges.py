"""What a step on whole matrices does besides updating them, and ways to write one, right and wrong."""

from __future__ import annotations

import copy
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn

import torch_shard
from tests.compat.harness import MLP, Pair, batch, plain_backward, same, same_params
from tests.optim.helpers import Descent, O, both
from tests.optim.matrix_optimizers import advance, gradients, maker
from tests.support.marks import quick
from tests.support.ranks import ranks
from torch_shard.errors import DivergenceError, ShardError
from torch_shard.optim.matrix import state as matrix_state


def pair_of(kind: Any, rank: int, world_size: int, **settings: Any) -> Pair:
    torch_shard.optim.register(kind, kind="matrix")
    return Pair(MLP, rank, world_size, optimizer=lambda model: kind(model.parameters()), **settings)


class Steps(Descent):
    """Declared, as it is."""


# -- gradients --------------------------------------------------------------------------------------------------------


class CountsWhatItOwns(Descent):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            params = [p for p in group["params"] if p.grad is not None]
            if params:
                group["step"] = group.get("step", 0) + 1
            for p in params:
                p.sub_(p.grad, alpha=group["lr"] / group["step"])


@ranks(2)
def test_a_count_that_only_owners_keep_is_an_error_on_all_ranks(rank: int, world_size: int) -> None:
    torch_shard.optim.register(CountsWhatItOwns, kind="matrix")
    pair = Pair(MLP, rank, world_size, optimizer=lambda model: CountsWhatItOwns([model.head.bias]))
    pair.step(plain_backward, batch(rank, 0))
    plain_backward(pair.model, batch(rank, 1))
    with pytest.raises(
        DivergenceError, match=r"counted \[\{'step': 1\}\] \(it must count on ranks that own no parameter"
    ):
        pair.optimizer.step()


class ClearsGradients(Descent):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        super().step()
        self.zero_grad()


@ranks(2, exhaustive=(1, 3))
def test_gradients_that_a_step_clears_are_cleared(rank, world_size):
    pair = pair_of(ClearsGradients, rank, world_size)
    for step in range(3):
        pair.backward(plain_backward, batch(rank, step))
        for _, optimizer in both(pair):
            optimizer.step()
        assert all(p.grad is None for p in pair.model.parameters())
        pair.check()


@ranks(2, exhaustive=(3,))
def test_gradients_must_be_cleared_after_the_step_of_a_declared_class(rank, world_size):
    pair = pair_of(Steps, rank, world_size)
    advance(pair, range(2))  # with zero_grad() before each backward
    with pytest.raises(ShardError, match=r"Steps.step\(\) may have changed the gradient of .* zero_grad\(\)"):
        plain_backward(pair.model, batch(rank, 2))
    pair.model.zero_grad(set_to_none=False)
    plain_backward(pair.model, batch(rank, 2))


class LoopInALoop(Descent):
    def update(self, p: Any, group: dict[str, Any]) -> None:
        if any(len(other) > 100 for other in self.param_groups):
            super().update(p, group)


class LeavesEarly(Descent):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, _ in zip(self.param_groups, [0], strict=False):
            for p in group["params"]:
                self.update(p, group)


class FirstGroupOnly(Descent):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            self.update(p, self.param_groups[0])


class DecaysFirst(Descent):
    """Something is changed within the loop, and the rest after it."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        found = []
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(0.9)
                found.append((p, p.grad))
        for p, grad in found:
            p.sub_(grad, alpha=0.1)


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        (LoopInALoop, "began a loop over the groups within another"),
        (LeavesEarly, "left its loop over the groups before the last"),
        (FirstGroupOnly, "asked for parameters outside its loop over the groups"),
        (DecaysFirst, "single memory location"),
    ],
)
@ranks(2, exhaustive=(3,))
def test_ways_of_stepping_that_lose_updates_are_refused_each_time(rank, world_size, kind, text):
    with mock.patch.object(matrix_state, "_SMALL", 0):
        pair = pair_of(kind, rank, world_size)
        for step in range(3):
            gradients(pair, step)
            with pytest.raises(RuntimeError, match=text):
                pair.optimizer.step()


# -- options and state ------------------------------------------------------------------------------------------------


class ByName(Descent):
    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for name, p in zip(group["param_names"], group["params"], strict=True):
                p.sub_(p.grad, alpha=group["lr"] * (0.1 if name.startswith("head") else 1.0))


@ranks(2, exhaustive=(1, 3))
def test_names_come_with_their_parameters(rank, world_size):
    torch_shard.optim.register(ByName, kind="matrix")
    pair = Pair(MLP, rank, world_size, optimizer=lambda model: ByName(model.named_parameters()))
    names = list(pair.optimizer.param_groups[0]["param_names"])
    advance(pair, range(2))
    assert pair.optimizer.param_groups[0]["param_names"] == names


class KeepsTotals(Descent):
    """State that is no parameter's."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self.state["rounds"]["n"] = self.state["rounds"].get("n", 0) + 1
        self.state["more"]["n"] = torch.tensor(2.0)
        super().step()

    def update(self, p: Any, group: dict[str, Any]) -> None:
        self.state[p]["seen"] = torch.ones(3)
        p.sub_(p.grad, alpha=group["lr"] / self.state["rounds"]["n"])


@pytest.mark.exhaustive
@ranks(2)
def test_state_of_no_parameter_is_saved_and_loaded(rank, world_size):
    pair = pair_of(KeepsTotals, rank, world_size)
    advance(pair, range(3))
    saved = pair.engine.optim_state_dict(pair.optimizer, rank0_only=False)
    assert saved["state"]["rounds"] == {"n": 3} and sorted(saved["other_state"]) == ["more", "rounds"]
    same(saved["state"]["more"]["n"], torch.tensor(2.0), "more")
    plain = pair.plain_optimizer.state_dict()
    pair.optimizer, pair.plain_optimizer = KeepsTotals(pair.model.parameters()), KeepsTotals(pair.plain.parameters())
    pair.engine.load_optim_state_dict(pair.optimizer, saved)
    pair.plain_optimizer.load_state_dict(copy.deepcopy(plain))
    advance(pair, range(3, 5))
    assert pair.optimizer.state["rounds"] == {"n": 5}


class CountsBesideMuon(O.Muon):
    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["n"] = self.state[p].get("n", 0) + 1
        return loss


@ranks(2)
def test_own_state_beside_that_of_a_base_class_is_refused(rank, world_size):
    def make(model: Any) -> Any:
        return CountsBesideMuon([p for p in model.parameters() if p.ndim == 2])

    pair = Pair(MLP, rank, world_size, optimizer=make)
    gradients(pair, 0)
    pair.optimizer.step()
    with pytest.raises(ShardError, match=r"CountsBesideMuon.*torch_shard\.optim\.register"):
        pair.optimizer.step()


@ranks(2)
def test_state_loaded_on_one_rank_only_is_an_error_on_all(rank, world_size):
    pair = Pair(MLP, rank, world_size, optimizer=maker("Muon"))
    advance(pair, range(2))
    early = copy.deepcopy(pair.plain_optimizer.state_dict())
    if rank == 0:
        pair.optimizer.load_state_dict(early)
    with pytest.raises(DivergenceError):
        plain_backward(pair.model, batch(rank, 2))
        pair.optimizer.step()


# -- closures and failures --------------------------------------------------------------------------------------------


class Twice(Descent):
    """Sharpness-aware: a loop, another gradient at the place it comes to, and a second loop from where it began."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["old"] = p.clone()
                p.add_(p.grad, alpha=0.1)
        self.zero_grad()
        with torch.enable_grad():
            loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                p.copy_(self.state[p]["old"])
                p.sub_(p.grad, alpha=group["lr"])
        return loss


@ranks(2, exhaustive=(1, 3))
def test_gradients_are_cleared_before_the_closure(rank, world_size):
    pair = pair_of(Twice, rank, world_size)
    for step in range(3):
        gradients(pair, 2 * step)
        for model, optimizer in both(pair):

            def closure(model: Any = model, step: int = step) -> Any:
                return plain_backward(model, batch(0, 2 * step + 1))

            optimizer.step(closure)
        assert all(p.grad is not None for p in pair.model.parameters())
        same_params(pair.model, pair.plain)


# -- close ------------------------------------------------------------------------------------------------------------


class Remembers(Descent):
    def update(self, p: Any, group: dict[str, Any]) -> None:
        total = self.state[p]["sum"] = self.state[p].get("sum", 0.0) + p.grad
        p.sub_(total, alpha=group["lr"])


class One(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.only = torch.nn.Linear(5, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.only(x)
        return y


@pytest.mark.parametrize("named", [False, True])
@ranks(2)
def test_a_rank_that_owns_nothing_closes_too(rank, world_size, named):
    torch_shard.optim.register(Remembers, kind="matrix")
    apart = torch.zeros(3, requires_grad=True)  # of no module
    pair = Pair(One, rank, world_size, optimizer=lambda model: Remembers(model.parameters()))
    other = Remembers([*pair.model.parameters(), apart])
    gradients(pair, 0)
    for optimizer in (pair.optimizer, other, pair.plain_optimizer):
        optimizer.step()
    held = [other] if rank == 0 else []  # what is alive need not be alike
    del other, optimizer
    pair.engine.close(*([pair.optimizer] if named else []))
    assert type(pair.model.only.weight) is torch.nn.Parameter and len(held) == (rank == 0)


# -- ways in which such optimizers are written -------------------------------------------------------------------------


class Whitened(Descent):
    def __init__(self, params):
        super().__init__(params, calls=torch.zeros(()), history=[])

    def update(self, p, group):
        state = self.state[p]
        total = state["sum"] = state.get("sum", 0.0) + p.grad
        if p.ndim == 2:
            total = total @ torch.linalg.inv(torch.eye(p.shape[1], dtype=p.dtype) + total.T @ total)
        p.sub_(total, alpha=group["lr"])


class CountsInPlace(Whitened):
    def begin(self, group):
        group["calls"] += 1
        group["history"].append(int(group["calls"]))

    def update(self, p, group):
        super().update(p, {"lr": group["lr"] / float(group["calls"])})


class CountsBehindTheLoop(Whitened):
    @torch.no_grad()
    def step(self, closure=None):
        super().step()
        self.param_groups[0]["lr"] *= 0.5
        self.state["all"]["rounds"] = self.state["all"].get("rounds", 0) + 1


class LooksAtParameters(Whitened):
    def update(self, p, group):
        if isinstance(p, nn.Parameter) and p.requires_grad:
            super().update(p, {"lr": group["lr"] * getattr(p, "scale", 1.0)})


WAYS = [Whitened, CountsInPlace, CountsBehindTheLoop, LooksAtParameters]


class ElementWise(LooksAtParameters):
    def update(self, p, group):
        if isinstance(p, nn.Parameter) and p.requires_grad:
            p.sub_(p.grad, alpha=group["lr"] * getattr(p, "scale", 1.0))


for way in WAYS:
    torch_shard.optim.register(way, kind="matrix")
torch_shard.optim.register(ElementWise, kind="elementwise")


def make(kind):
    def optimizer(model):
        model.head.weight.scale, model.blocks[1].up.bias.scale = 3.0, 0.25  # which deepcopy does not copy
        return kind(model.parameters())

    return optimizer


@pytest.mark.parametrize("kind", [*quick(WAYS, [Whitened, LooksAtParameters]), ElementWise])
@ranks(2, exhaustive=(1, 3))
def test_a_declared_optimizer_may_be_written_in_these_ways(rank, world_size, kind):
    pair = Pair(MLP, rank, world_size, optimizer=make(kind))
    for step in range(4):
        pair.step(plain_backward, batch(rank, step))
    pair.check()
    for ours, theirs in zip(pair.optimizer.param_groups, pair.plain_optimizer.param_groups, strict=True):
        for key in ("lr", "calls", "history"):
            same(torch.as_tensor(ours[key]), torch.as_tensor(theirs[key]), key)
    assert pair.optimizer.state.get("all") == pair.plain_optimizer.state.get("all")


@ranks(2)
def test_ranks_that_list_parameters_in_another_order_are_told(rank, world_size):
    pair = Pair(MLP, rank, world_size)
    params = list(pair.model.parameters())
    optimizer = Whitened(params if rank == 0 else params[::-1])
    plain_backward(pair.model, batch(rank, 0))
    with pytest.raises(DivergenceError, match="order"):
        optimizer.step()
    pair.check()


@ranks(2)
def test_closing_gives_state_back_in_its_own_dtype(rank, world_size):
    model = nn.Linear(5, 7).to(torch.bfloat16)
    engine = torch_shard.shard(model)
    optimizer = O.Adafactor(model.parameters())
    model(torch.ones(2, 5, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    for own in optimizer.state.values():
        own["extra"] = torch.ones(3, dtype=torch.float32)
    engine.close(optimizer)
    own = optimizer.state[model.weight]
    assert own["step"].dtype == torch.float32 and own["row_var"].shape == (7, 1)
    assert own["extra"].dtype == torch.float32
