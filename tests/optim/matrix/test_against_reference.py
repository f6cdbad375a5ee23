"""Steps on whole matrices: parameters, bytes sent and the balance of owners are those of the reference."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import torch_shard
from tests.support.examples import many, quick
from tests.support.ranks import run
from tests.support.reference import ReferenceEngine, muon, sgd, work_on_matrix

RATES = (0.1, 0.02)  # of the two groups


@dataclass(frozen=True)
class Case:
    """Parameters by shape: matrices and vectors.

    Attributes:
        shapes: of the parameters.
        turned: which of them lie in memory the other way round.
        unused: which of them are in no loss.
        units: their numbers, unit by unit.
        second: which matrices are in the optimizer's second group.
    """

    shapes: tuple[tuple[int, ...], ...]
    turned: frozenset[int]
    unused: frozenset[int]
    units: tuple[tuple[int, ...], ...]
    second: frozenset[int]
    steps: int = 2

    def groups(self) -> list[list[int]]:
        """Return the matrices of each group of the optimizer."""
        matrices = [n for n, shape in enumerate(self.shapes) if len(shape) == 2]
        return [[n for n in matrices if (n in self.second) == second] for second in (False, True)]


class Muon(torch.optim.Optimizer):
    """The reference's update, in an optimizer."""

    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    muon(p, p.grad, self.state[p], lr=group["lr"])


torch_shard.optim.register(Muon, kind="matrix")


class Parameters(nn.Module):
    """The loss pulls each parameter to a target, another one on each rank."""

    def __init__(self, case: Case) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.case = case
        self.all = nn.ParameterList()
        for n, shape in enumerate(case.shapes):
            value = torch.randn(shape, generator=generator, dtype=torch.float64)
            self.all.append(nn.Parameter(value.t().contiguous().t() if n in case.turned else value))

    def forward(self, rank: int, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(100 * step + rank)
        total = torch.zeros((), dtype=torch.float64)
        for n, p in enumerate(self.all):
            target = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            if n not in self.case.unused:
                total = total + (p - target).pow(2).sum()
        return total


def names(case: Case) -> list[list[str]]:
    return [[f"all.{n}" for n in unit] for unit in case.units]


def train(rank: int, world_size: int, case: Case) -> tuple[dict[str, torch.Tensor], list[int], list[str]]:
    """Train on a rank: its part of each parameter, the bytes that each step on matrices has sent, and the matrices it owns."""
    model = Parameters(case)
    engine = torch_shard.shard(model, units=names(case), timeout=20.0)
    parameters = dict(model.all.named_parameters())
    groups = [
        {"params": [parameters[str(n)] for n in group], "lr": lr}
        for group, lr in zip(case.groups(), RATES, strict=True)
    ]
    optimizer = Muon(groups)
    vectors = [p for p in parameters.values() if p.dim() != 2]
    others = [torch.optim.SGD(vectors, lr=0.1)] if vectors else []
    sent = []
    for step in range(case.steps):
        model(rank, step).backward()
        before = engine.statistics()
        optimizer.step()
        sent.append(engine.statistics().since(before).bytes_sent)
        for other in others:
            other.step()
        model.zero_grad()
    owned = [f"all.{n}" for n, p in parameters.items() if optimizer.state.get(p)]
    return {f"all.{n}": p.to_local().clone() for n, p in parameters.items()}, sent, owned


def hold(case: Case, ranks: int) -> None:
    results = run(ranks, train, case)
    reference = ReferenceEngine(Parameters(case), names(case), ranks)
    owners = {name: rank for rank, (_, _, owned) in enumerate(results) for name in owned}
    stepped = {f"all.{n}" for group in case.groups() for n in group} - {f"all.{n}" for n in case.unused}
    assert sorted(owners) == sorted(name for _, _, owned in results for name in owned), "a matrix has two owners"
    assert stepped == set(owners)
    balanced(reference, owners, ranks)
    vectors = [name for name, p in reference.parameters.items() if p.dim() != 2]
    for step in range(case.steps):
        reference.backward(functools.partial(lambda model, rank, step: model(rank, step), step=step))
        sent = [0] * ranks
        for group, lr in zip(case.groups(), RATES, strict=True):
            mine = {f"all.{n}": owners[f"all.{n}"] for n in group if f"all.{n}" in owners}
            more = reference.step_on_matrices(functools.partial(muon, lr=lr), mine)
            sent = [a + b for a, b in zip(sent, more, strict=True)]
        assert [result[1][step] for result in results] == sent
        reference.step(functools.partial(sgd, lr=0.1), vectors)
        reference.zero_grad()
    for rank, (parts, _, _) in enumerate(results):
        torch.testing.assert_close(parts, reference.held_by(rank), rtol=1e-12, atol=1e-12)


def balanced(reference: ReferenceEngine, owners: dict[str, int], ranks: int) -> None:
    """Assert that no rank has more work than the mean and one matrix."""
    work = {name: work_on_matrix(*p.shape) for name, p in reference.parameters.items() if name in owners}
    loads = [sum(work[name] for name in owners if owners[name] == rank) for rank in range(ranks)]
    assert max(loads) <= sum(loads) / ranks + max(work.values(), default=0)


@st.composite
def cases(draw: st.DrawFn) -> Case:
    sizes = st.integers(1, 6)
    shapes = draw(
        st.lists(st.one_of(st.tuples(sizes, sizes), st.tuples(sizes, sizes), st.tuples(sizes)), min_size=1, max_size=7)
    )
    shapes.append((draw(sizes), draw(sizes)))  # the optimizer needs one
    numbers = list(range(len(shapes)))
    some = st.frozensets(st.sampled_from(numbers), max_size=3)
    matrices = {n for n in numbers if len(shapes[n]) == 2}
    cut = draw(st.integers(1, len(numbers)))
    units = tuple(unit for unit in (tuple(numbers[:cut]), tuple(numbers[cut:])) if unit)
    return Case(
        tuple(shapes), draw(some) & matrices, draw(some) - {numbers[-1]}, units, draw(some), draw(st.integers(1, 3))
    )


@pytest.mark.parametrize("ranks", [2, 3])
@quick(6)
@given(cases())
def test_steps_on_matrices_are_those_of_the_reference(ranks: int, case: Case) -> None:
    hold(case, ranks)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@many(200)
@given(cases())
def test_many_steps_on_matrices_are_those_of_the_reference(ranks: int, case: Case) -> None:
    hold(case, ranks)
