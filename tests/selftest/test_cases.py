"""The cases themselves, on the ranks of the tests: they fail for an engine with a fault."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from torch_shard.selftest import correctness, memory
from torch_shard.selftest.cases import cases_of
from torch_shard.selftest.context import Context, Setting
from torch_shard.selftest.plain import Recipe, distance, train_plainly
from torch_shard.selftest.ranks import Ranks
from torch_shard.selftest.results import PARTS


class OwnRanks(Ranks):
    """The ranks of the tests, whose process group exists."""

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world, self.device = rank, world_size, torch.device("cpu")


def statuses(rank: int, world_size: int, part: str, *names: str, folder=None) -> list[str]:
    setting = Setting("cpu", world_size, quick=True)
    context = Context(OwnRanks(rank, world_size), setting, folder)
    cases = {case.name: case for case in cases_of(part, setting)}
    return [result.status for name in names for result in cases[name].run(context, cases[name])]


def spoiled(divisor: float):
    """The engine's ``shard`` with another divisor of gradients than the number of ranks."""
    shard = correctness.shard

    def wrong(model, **settings):
        engine = shard(model, **settings)
        for unit in engine.units:
            for flat in unit.flats:
                flat.gradients.divide_by(divisor)
        return engine

    return wrong


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize("precision", ["fp32", *exhaustive("bf16 reduced in fp32", "bf16")])
@ranks(2)
def test_gradients_of_twice_or_half_their_size_fail(rank, world_size, precision, optimizer):
    name = f"full_shard, {precision}, {optimizer}"
    for divisor, expected in ((1.0, "failed"), (2.0, "passed"), (4.0, "failed")):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(correctness, "shard", spoiled(divisor))
            assert statuses(rank, world_size, "correctness", name) == [expected]


@ranks(2)
def test_a_comparison_that_can_not_tell_a_wrong_scale_fails(rank, world_size):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(correctness.TOLERANCES, "fp32", 10.0)
        assert statuses(rank, world_size, "correctness", "full_shard, fp32, SGD") == ["failed"]


@ranks(2)
def test_a_plan_that_is_a_byte_off_fails(rank, world_size):
    real = memory.shard

    def wrong(*given):
        engine = real(*given)
        predicted = engine.plan.predicted
        patch.setattr(
            type(engine.plan), "predicted", dataclasses.replace(predicted, parameters=predicted.parameters + 1)
        )
        return engine

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory, "shard", wrong)
        found = statuses(rank, world_size, "memory", "full_shard, fp32")
    assert found == ["failed", "passed", "passed", "passed", "passed"]


@ranks(2)
def test_a_prediction_that_is_too_low_fails(rank, world_size):
    true = memory._predicted_peak
    with pytest.MonkeyPatch.context() as patch:
        # Reductions that end early lower the measured peak, on a busy machine by more than a tenth.
        patch.setattr(memory, "_predicted_peak", lambda *given: int(0.6 * true(*given)))
        found = statuses(rank, world_size, "memory", "full_shard, fp32")
    assert found == ["passed", "passed", "passed", "passed", "failed"]


@pytest.mark.exhaustive
@ranks(4)
def test_on_four_ranks_the_hybrid_strategies_are_checked(rank, world_size):
    names = [f"{strategy}, fp32, SGD" for strategy in ("hybrid_shard", "hybrid_shard_zero2")]
    assert statuses(rank, world_size, "correctness", *names) == ["passed", "passed"]


@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
def test_a_wrong_scale_is_far_from_the_plain_training_by_losses_updates_and_norms(optimizer):
    recipe = Recipe(optimizer)
    plain = train_plainly(recipe, torch.device("cpu"), 2)
    assert set(distance(plain, plain).values()) == {0.0}
    wrong = distance(train_plainly(dataclasses.replace(recipe, gradient_scale=2.0), torch.device("cpu"), 2), plain)
    assert min(wrong.values()) > 0.05, wrong


@pytest.mark.parametrize("setting", [Setting("cpu", 2, quick=True), Setting("cuda", 8)])
def test_names_of_cases_are_unique_and_only_what_can_not_run_is_skipped(setting):
    for part in PARTS:
        cases = cases_of(part, setting)
        assert len({case.name for case in cases}) == len(cases)
        if setting.kind == "cuda":
            assert not any(case.skip for case in cases)


@pytest.mark.parametrize("what", ["losses", "norms"])
def test_a_nan_in_a_later_step_is_no_small_error(what):
    plain = train_plainly(Recipe(), torch.device("cpu"), 1)
    found = dataclasses.replace(plain, **{what: [*getattr(plain, what)[:-1], float("nan")]})
    assert max(distance(found, plain).values()) == float("inf")
