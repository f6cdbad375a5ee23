"""The benchmark of offload can't be run here as it is meant; what it makes of a trace can be checked."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parents[2] / "bench"


@pytest.fixture
def steps(monkeypatch):
    if not BENCH.is_dir():
        pytest.skip("the benchmarks are not in the wheel")
    monkeypatch.syspath_prepend(str(BENCH))
    before = set(sys.modules)
    import offload_steps

    yield offload_steps
    for name in set(sys.modules) - before:
        if str(getattr(sys.modules[name], "__file__", "")).startswith(str(BENCH)):
            del sys.modules[name]


@pytest.fixture
def waiting(steps):
    return steps.waiting


def test_what_kernels_and_copies_leave_of_a_step_is_added_up(waiting):
    kernels = [(0.0, 2.0), (1.0, 3.0), (1.5, 2.5), (6.0, 7.0)]  # of several streams
    copies = [(2.0, 4.0), (6.5, 6.6), (9.0, 12.0)]
    idle, crossing = waiting(kernels, copies, 0.0, 10.0)
    assert idle == pytest.approx(0.6)  # from 3 to 6 and from 7 to 10
    assert crossing == pytest.approx(0.2)  # from 3 to 4 and from 9 to 10


def test_what_begins_before_or_ends_after_counts_in_part(waiting):
    assert waiting([(-5.0, 1.0), (9.0, 20.0)], [], 0.0, 10.0) == (pytest.approx(0.8), 0.0)


def test_a_gpu_that_never_stops_waits_for_nothing(waiting):
    assert waiting([(0.0, 4.0), (4.0, 10.0)], [(0.0, 10.0)], 0.0, 10.0) == (0.0, 0.0)


@pytest.mark.parametrize("model", ["1B", "7B"])
def test_in_bf16_the_plan_fits_in_two_units_and_a_gigabyte(steps, model):
    b = steps.plan_of(model, "offload").predicted
    assert b.device == 0
    assert b.device_peak <= b.gathered_peak + 10**9
