"""bench/launches.py counts for both engines, with the simulated device of these tests and the torch that is installed."""

from __future__ import annotations

import contextlib
import io
import warnings
from pathlib import Path

import pytest

from tests.support.ranks import ranks

BENCH = Path(__file__).resolve().parents[2] / "bench"


@ranks(2)
def test_it_counts_what_both_engines_give_a_device_to_do(rank, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.syspath_prepend(str(BENCH))
    import launches

    args, printed = launches.options(["--tiny"]), io.StringIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        result = launches.count_all(args)
    with contextlib.redirect_stdout(printed):
        launches.report(result, args)
    head, _, *rows = (line.strip("| ").split(" | ") for line in printed.getvalue().splitlines() if line[:1] == "|")
    assert [row[1] for row in rows] == ["FSDP2", "torch_shard"]
    for row in rows:
        figures = {name: float(cell) for name, cell in zip(head[2:], row[2:], strict=True)}
        assert figures["per block: kernels"] > 0 and figures["bytes a parameter element"] > 0
        assert figures["collectives"] == 3, "the block is gathered twice, and its gradients are reduced"
        assert figures["events"] > 0 and figures["waits of streams"] > 0
    assert figures["per block: kernels"] <= 4 and figures["bytes a parameter element"] <= 8
    assert figures["per step: messages for which the host waits"] == figures["waits of the host for the device"] == 0
