"""On a simulated device, whatever reads or writes memory is ordered behind what wrote or read it before."""

from __future__ import annotations

import re

import pytest

from tests.simulated.scenarios import ALONE, HYBRID, QUICK, SCENARIOS
from tests.support.marks import exhaustive, quick
from tests.support.ranks import ranks


def check(scenario, pace="late", seed=0):
    report = scenario.run(pace, seed)
    assert report.loss == report.loss
    assert not report.races + report.failures, "\n".join(report.races + report.failures)


# The strategies differ in when units are gathered and freed, not in how values are cast: one mixed precision is enough for these.
LEFT_OUT = re.compile(r"(shard_grad_op|shard_optim|no_shard), (fp16|bf16(?! summed))")


@pytest.mark.parametrize("name", quick((n for n in SCENARIOS if n in QUICK or not LEFT_OUT.match(n)), QUICK))
@ranks(2)
def test_all_accesses_are_ordered(rank, name):
    check(SCENARIOS[name])


@pytest.mark.parametrize("pace", exhaustive("early", "random"))
@pytest.mark.parametrize("name", QUICK)
@ranks(2)
def test_accesses_are_ordered_whenever_events_pass(rank, name, pace):
    check(SCENARIOS[name], pace, seed=rank)


@pytest.mark.parametrize("name", quick(ALONE, ["two streams in bf16"]))
@ranks(1)
def test_accesses_of_one_process_are_ordered(rank, name):
    check(ALONE[name])


PARALLEL = [name for name, scenario in HYBRID.items() if scenario.parallelized is not None]


@pytest.mark.parametrize("name", quick([n for n in HYBRID if n not in PARALLEL], ["hybrid_shard, bf16 summed in fp32"]))
@ranks(4)
def test_accesses_between_replicas_are_ordered(rank, name):
    check(HYBRID[name])


@pytest.mark.parametrize("name", exhaustive(*PARALLEL))
@ranks(4, fresh=True)  # DTensor keeps meshes that are equal to the next ones, and whose process groups are gone by then
def test_accesses_under_tensor_parallelism_are_ordered(rank, name):
    check(HYBRID[name])


STEADY = (
    "full_shard, bf16 summed in fp32",
    "full_shard, bf16 summed in fp32, accumulated",
    "sgd",
    "fused",
    "muon",
    "rounded",
    "quantized",
)
# Where more than two reductions are under way, backward's host asks the oldest until it has ended, see `ReduceSchedule._issue`.
REDUCTIONS = {"comm/gradient_reduction.py wait_for_own_part", "comm/work.py is_completed"}


@pytest.mark.parametrize("name", quick(STEADY, ["fused"]))
@ranks(2)
def test_in_a_step_that_repeats_the_host_waits_for_the_oldest_reductions_alone(rank, name):
    waits = SCENARIOS[name].run("late").waits
    assert {re.sub(r":\d+", "", where) for where in waits} <= REDUCTIONS
