"""Parameters after some training are those of the reference, on each rank the part that the reference's layout gives it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.examples import many, quick
from tests.support.ranks import run
from tests.support.training import Case, cases, same, train


@pytest.mark.parametrize("ranks", [1, 2, 3])
@quick(10)
@given(st.data())
def test_a_random_training_is_that_of_the_reference(ranks: int, data: st.DataObject) -> None:
    case: Case = data.draw(cases(ranks))
    same(run(ranks, train, case), case)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@many(150)
@given(st.data())
def test_many_random_trainings_are_those_of_the_reference(ranks: int, data: st.DataObject) -> None:
    case: Case = data.draw(cases(ranks))
    same(run(ranks, train, case), case)


@pytest.mark.parametrize("strategy", ["hybrid_shard", "hybrid_shard_zero2"])
@many(150)
@given(st.data())
def test_replicas_train_as_the_reference_with_replicas(strategy: str, data: st.DataObject) -> None:
    case: Case = data.draw(cases(4, settings=(("strategy", strategy), ("shard_size", 2)), replicas=2))
    same(run(4, train, case), case)
