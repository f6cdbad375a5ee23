"""Units are gathered and gradients reduced in the order that the reference says, on every rank."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.cells import Case, Pass, branches, cases, predict, record
from tests.support.examples import many, quick
from tests.support.ranks import RankFailure, run


def hold(case: Case, ranks: int) -> None:
    predicted = predict(case, ranks)
    for rank, recorded in enumerate(run(ranks, record, case)):
        assert recorded == predicted, f"rank {rank}"


EVERYWHERE, NOWHERE = (), (0, 1)
TWICE = Pass((0, 1, 0, 2), (EVERYWHERE,) * 4)
STRAIGHT, WITHOUT = Pass((0, 1, 2), (EVERYWHERE,) * 3), Pass((0, 1, 2), (EVERYWHERE, NOWHERE, EVERYWHERE))


@quick(15)
@example(Case(("trainable",) * 3, (TWICE,) * 3))  # what is gathered ahead is kept
@example(
    Case(("trainable",) * 3, (STRAIGHT, STRAIGHT, WITHOUT, WITHOUT))
)  # what nobody needs is gathered once more, not twice
@given(cases(2))
def test_collectives_come_in_the_order_of_the_reference(case: Case) -> None:
    hold(case, 2)


@quick(8)
@given(cases(2, strategy="shard_grad_op"))
def test_parameters_that_stay_are_gathered_once(case: Case) -> None:
    hold(case, 2)


@pytest.mark.exhaustive
@quick(8)
@given(branches(2))
def test_ranks_whose_loss_leaves_units_out_take_part_in_their_gathers(case: Case) -> None:
    hold(case, 2)


@pytest.mark.parametrize("ranks", [2, 3])
@many(300)
@given(st.data())
def test_collectives_of_many_models_come_in_the_order_of_the_reference(ranks: int, data: st.DataObject) -> None:
    strategy = data.draw(st.sampled_from(["full_shard", "shard_grad_op"]))
    hold(data.draw(st.one_of(cases(ranks, strategy=strategy), branches(ranks))), ranks)


def differs(kinds: tuple[str, ...], cells: tuple[int, ...], *detached: dict[int, tuple[int, ...]]) -> Case:
    """Two passes with all cells in the loss, then passes with some uses (by position) detached on some ranks."""
    passes = [Pass(cells, tuple(some.get(n, EVERYWHERE) for n in range(len(cells)))) for some in ({}, {}, *detached)]
    return Case(kinds, tuple(passes))


@pytest.mark.exhaustive
@pytest.mark.xfail(strict=True, raises=RankFailure, reason="DivergenceError; plain training would go on")
@pytest.mark.parametrize(
    "case",
    [
        pytest.param(differs(("trainable",) * 3, (0, 1, 2), {2: (1,)}), id="the unit used last"),
        pytest.param(differs(("trainable",) * 3, (0, 1, 0, 2), {2: (1,)}), id="one of two uses of a unit"),
        pytest.param(differs(("trainable", "bias"), (0, 1, 0), {1: (1,)}), id="between two uses of another unit"),
        pytest.param(differs(("trainable",) * 3, (0, 1, 2), {1: (0, 1)}, {1: (1,)}), id="after a step without it"),
    ],
)
def test_what_else_may_be_in_the_loss_of_some_ranks_only(case: Case) -> None:
    hold(case, 2)
