"""A step that torch.profiler has recorded: its streams, its memory and its waits, beside what was predicted of it."""

from __future__ import annotations

import gzip
import json
import re
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule

import torch_shard
from tests.support.ranks import ranks
from torch_shard import Precision, ShardConfig
from torch_shard.errors import ConfigError
from torch_shard.plan import Replay, Search, replayed_reductions, run_report, search
from torch_shard.plan.devices import LINKS
from torch_shard.plan.hardware import Hardware
from torch_shard.plan.planner import make_plan
from torch_shard.plan.profiled_step import ProfiledStep
from torch_shard.plan.sharded_step import sharded_step
from torch_shard.plan.step_timeline import timeline_of
from torch_shard.plan.step_trace import CollectiveStart
from torch_shard.plan.trace_for import trace_for

WIDTH, LAYERS, BATCH = 256, 4, 256
NAMES = [str(i) for i in range(LAYERS)]


def blocks(names: Sequence[str] = NAMES) -> nn.Module:
    return nn.Sequential(OrderedDict((n, nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())) for n in names))


def step(model: nn.Module, optimizer: torch.optim.Optimizer, micro_batches: int = 1) -> None:
    for _ in range(micro_batches):
        model(torch.ones(BATCH, WIDTH)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


class Run:
    """A few steps of training, of which the last two have left a trace in a file."""

    def __init__(
        self, path: Path, config: ShardConfig, names: Sequence[str] = NAMES, micro_batches: int = 1, memory: bool = True
    ) -> None:
        torch.manual_seed(0)
        self.model, self.path = blocks(names), path
        self.engine = torch_shard.shard(self.model, config)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        recorded = schedule(wait=0, warmup=4, active=2, repeat=1)
        with profile(activities=[ProfilerActivity.CPU], profile_memory=memory, schedule=recorded) as profiler:
            for _ in range(6):
                before = self.engine.statistics()
                step(self.model, self.optimizer, micro_batches)
                profiler.step()
        self.sent = self.engine.statistics().since(before).bytes_sent  # in the last step
        profiler.export_chrome_trace(str(path))
        self.found = ProfiledStep.read(path, list(names), False)


def replay_of(config: ShardConfig) -> Replay:
    """Return a step as it is predicted for the ranks that run here."""
    model, world = blocks(), dist.get_world_size()
    optimizer = torch.optim.AdamW(model.parameters())
    plan = make_plan(model, config, config.shard_size or world)
    trace = trace_for(model, lambda m: step(m, optimizer), plan, config, optimizers=[optimizer])
    replayed, clock = sharded_step(trace, plan, config, data_parallel=world), []
    hardware = Hardware.of(1, world, on="cpu", intra=LINKS["nvlink4"], inter=LINKS["nvlink4"])
    timeline = timeline_of(replayed, hardware, clock)
    return Replay(plan, replayed, timeline, clock)


@ranks(2, exhaustive=(3, 5))
def test_a_profile_has_the_last_step_with_the_units_of_its_collectives(rank: int, tmp_path: Path) -> None:
    found = Run(tmp_path / f"{rank}.json", ShardConfig(strategy="full_shard", prefetch=1)).found
    assert [unit for _, kind, unit in found.issued if kind == "reduce_scatter"] == NAMES[::-1]
    # In backward the last unit is there yet, and nothing needs the first one.
    assert [unit for _, kind, unit in found.issued if kind == "all_gather"] == [*NAMES, *NAMES[-2:0:-1]]
    seconds = [second for second, *_ in found.issued]
    assert seconds == sorted(seconds) and seconds[0] > 0 and seconds[-1] < found.timeline.total
    assert {span.stream for span in found.timeline.spans} == {"compute", "gather", "reduce"}
    for span in found.timeline.spans:
        assert 0 <= span.start <= span.end
        if span.stream != "compute":  # it ran after it was issued
            assert span.start >= next(s for s, kind, unit in found.issued if (kind, unit) == (span.kind, span.name))
    assert {wait.name for wait in found.waits} <= set(NAMES)
    for wait in found.waits:  # the picture shows them between what was computed
        computed = [(s.start, s.end) for s in found.timeline.spans if s.stream == "compute"]
        assert not any(start < wait.end and wait.start < end for start, end in computed)
    # Forward gathers two units at a time, and keeps the activations of all.
    gathered = 2 * 4 * (WIDTH * WIDTH + WIDTH)
    assert max(nbytes for _, nbytes in found.memory) > gathered + LAYERS * BATCH * WIDTH * 4


@ranks(2)
def test_measured_memory_is_drawn_over_what_was_predicted_of_the_same_step(rank: int, tmp_path: Path) -> None:
    model = blocks()
    optimizer = torch.optim.AdamW(model.parameters())

    def search_in(memory: int) -> Search:
        return search(
            model, lambda m: step(m, optimizer), memory=memory, ranks=2, on="cpu", optimizers=[optimizer], margin=0
        )

    def peak() -> int:
        found = search_in(1 << 40).estimates
        return next(each.nbytes for each in found if str(each.candidate) == "full_shard, prefetch 1")

    most = peak()
    with patch.object(replayed_reductions, "has_too_many", lambda in_flight, on_streams: in_flight > 0):
        least = peak()
    predicted = search_in(most)
    run = Run(tmp_path / f"{rank}.json", predicted.best.candidate.config(ShardConfig()))
    page = tmp_path / f"{rank}.html"
    run.engine.report(page, run.optimizer, profile=run.path, predicted=predicted)
    text = page.read_text()
    assert (
        "memory of the profiled step" in text
        and "streams of the profiled step" in text
        and "other collectives" not in text
    )
    assert (
        "computing waits" in text
        and "<td>reduce-scatter</td><td>within a node</td>" in text
        and len(re.findall("<svg", text)) == 4
    )
    assert ">measured<" in text and ">activation<" in text and f">budget, {most / 2**20:,.1f} MiB<" in text
    # Both begin with the same bytes, and the highest moment is that of the plan, but for the buffers of reductions: which of
    # those have ended is chance.
    states = sum(run.engine.memory_summary(run.optimizer)[kind] for kind in ("parameters", "gradients", "optimizer"))
    highest = states + max(nbytes for _, nbytes in run.found.memory)
    assert predicted.replay.step.peak().total == most
    # One tensor of the batch's size may be freed a moment later, when a thread of Gloo's lets go of it.
    assert 0.97 * least < highest < 1.03 * most + 4 * BATCH * WIDTH
    run.engine.report(page, run.optimizer, profile=run.path)
    assert ">measured<" in page.read_text() and ">activation<" not in page.read_text()


CONFIGS = {
    "no_shard": ShardConfig(strategy="no_shard"),
    "shard_optim": ShardConfig(strategy="shard_optim"),
    "shard_grad_op": ShardConfig(strategy="shard_grad_op"),
    "full_shard": ShardConfig(strategy="full_shard", prefetch=1),
    "bf16": ShardConfig(strategy="full_shard", precision=Precision(torch.bfloat16)),
    "hybrid_shard": ShardConfig(strategy="hybrid_shard", shard_size=2),
}


@pytest.mark.parametrize(
    "name",
    [*[pytest.param(name, marks=pytest.mark.exhaustive) for name in CONFIGS if name != "full_shard"], "full_shard"],
)
@ranks(2, exhaustive=(4,))
def test_what_was_predicted_is_put_where_the_same_collectives_were_started(
    rank: int, tmp_path: Path, name: str
) -> None:
    config = CONFIGS[name]
    if name == "hybrid_shard" and dist.get_world_size() == 2:
        pytest.skip("one replica")
    replay, run = replay_of(config), Run(tmp_path / f"{rank}.json", config)
    found = run.found
    assert sum(replay.timeline.sent.values()) == run.sent
    clock, aligned = found.clock_for(replay)
    assert aligned and len(clock) == len(replay.clock)
    assert clock == sorted(clock) and clock[0] == 0 and clock[-1] == pytest.approx(found.timeline.total)
    starts = {}
    for second, event in zip(clock, replay.step.events, strict=True):
        if isinstance(event, CollectiveStart):
            starts.setdefault((event.kind == "all_gather", event.unit), second)
    for second, kind, unit in reversed(found.issued):  # the first ones last
        if kind != "all_reduce":
            measured = second
            first = next(s for s, k, u in found.issued if (k == "all_gather", u) == (kind == "all_gather", unit))
            assert starts[kind == "all_gather", unit] == pytest.approx(first) and first <= measured


@ranks(2)
def test_a_prediction_lies_under_the_last_micro_batch_and_another_step_is_stretched(rank: int, tmp_path: Path) -> None:
    config = ShardConfig(strategy="full_shard", prefetch=1)
    replay = replay_of(config)
    found = Run(tmp_path / f"{rank}.json", config, micro_batches=3).found
    clock, aligned = found.clock_for(replay)
    starts = sum(isinstance(event, CollectiveStart) for event in replay.step.events)
    assert aligned and len(found.issued) > starts
    assert clock[0] == pytest.approx(found.issued[-starts - 1][0]) and clock[-1] == pytest.approx(found.timeline.total)
    other = ProfiledStep(found.timeline, (), (), None, found.issued[:1])
    clock, aligned = other.clock_for(replay)
    ratio = found.timeline.total / replay.clock[-1]
    assert not aligned and clock == pytest.approx([ratio * second for second in replay.clock])


@ranks(2)
def test_units_of_any_name_are_found_in_a_trace_that_is_valid(rank: int, tmp_path: Path) -> None:
    names = ["it's", 'a"b', "a\\b", "50%25", "größe", "模型"]
    run = Run(tmp_path / f"{rank}.json", ShardConfig(strategy="full_shard"), names, memory=False)
    assert [unit for _, kind, unit in run.found.issued if kind == "reduce_scatter"] == names[::-1]
    # Compressed, and without plots: what computing waits for needs none.
    packed = tmp_path / f"{rank}.json.gz"
    packed.write_bytes(gzip.compress(run.path.read_bytes()))
    page = tmp_path / f"{rank}.html"
    with patch.object(run_report, "has_plots", lambda: False):
        run.engine.report(page, profile=packed)
    assert "streams of the profiled step" in page.read_text() and "<svg" not in page.read_text()
    for given in ({}, {"profile": packed}):  # which has no memory
        with pytest.raises(ConfigError, match=r"predicted=.*profile_memory=True"):
            run.engine.report(page, predicted=object(), **given)  # type: ignore[arg-type]


def event(
    name: str, start: float, end: float, cat: str = "user_annotation", tid: int = 1, **args: Any
) -> dict[str, Any]:
    """Return an event of a trace, between two milliseconds."""
    return {
        "ph": "X",
        "cat": cat,
        "name": name,
        "tid": tid,
        "ts": 1e6 + 1e3 * start,
        "dur": 1e3 * (end - start),
        "args": args,
    }


def launched(start: float, end: float, at: float, number: int, stream: int, tid: int = 1) -> list[dict[str, Any]]:
    """Return a kernel, and its launch by the host at a millisecond."""
    call = event("cudaLaunchKernel", at, at + 0.01, "cuda_runtime", tid, correlation=number)
    return [event("a kernel", start, end, "kernel", 0, correlation=number, stream=stream), call]


def memory(at: float, device: int, nbytes: int, total: int) -> dict[str, Any]:
    args = {"Device Type": device, "Bytes": nbytes, "Total Allocated": total}
    return {"ph": "i", "name": "[memory]", "ts": 1e6 + 1e3 * at, "args": args}


def test_kernels_belong_to_the_ranges_and_to_the_step_in_which_they_were_launched() -> None:
    events = [
        event("ProfilerStep#4", 0, 20),
        event("ProfilerStep#3", -20, 0),
        *launched(-1, 1, -0.5, 1, 20),  # of the step before, which the device ends meanwhile
        event("torch_shard: the all-gather of unit 'a'", 1, 2),
        *launched(2.5, 3, 1.2, 2, 16),
        *launched(2, 4, 2.5, 3, 7),
        *launched(3, 9, 1.5, 4, 16),
        *launched(2, 2.5, 2.9, 5, 16),  # a cast on the gather stream, outside of the range
        *launched(9, 10, 2.6, 6, 7),  # it has waited for the gather
        event("torch_shard: the gradient reduction of unit 'a'", 11, 12, tid=2),  # of the thread of a backward
        event("torch_shard: the gradient reduction of unit 'b'", 11, 12, tid=1),  # of another engine
        *launched(11.5, 13, 11.1, 7, 20, tid=2),
        *launched(18, 25, 17.5, 8, 7),  # the device is behind the host
        *launched(14, 15, 13.5, 9, 9),  # a stream of the user's
        memory(5, 1, 100, 1100),
        memory(5, 0, 7, 7),
        memory(6, 1, -40, 1060),
        event("of the next step", 26, 27, "kernel", 0, correlation=99, stream=7),
    ]
    found = ProfiledStep._from_events(events, ["a"], True)
    rows: dict[str, list[Any]] = {}
    for span in found.timeline.spans:
        rows.setdefault(span.stream, []).append(
            (round(1000 * span.start, 6), round(1000 * span.end, 6), span.name, span.kind)
        )
    assert rows == {
        "gather": [(2, 2.5, "", "copy"), (2.5, 3, "a", "all_gather"), (3, 9, "a", "all_gather")],
        "compute": [(2, 4, "", "compute"), (9, 10, "", "compute"), (18, 25, "", "compute")],
        "reduce": [(11.5, 13, "a", "reduce_scatter")],
        "stream 9": [(14, 15, "", "copy")],
    }
    assert found.memory == [(pytest.approx(0.005), 100), (pytest.approx(0.006), 60)] and found.allocated == 1000
    assert [(round(1000 * w.start, 6), round(1000 * w.end, 6), w.kind, w.name) for w in found.waits] == [
        (0, 2, "host", ""),
        (4, 9, "all_gather", "a"),
        (10, 18, "reduce_scatter", "a"),
    ]
    assert found.timeline.total == pytest.approx(0.025)


def test_collectives_of_others_on_the_cpu_are_not_taken_for_those_of_units() -> None:
    ours = [
        event("torch_shard: the gradient reduction of unit 'b'", 1, 2),
        event("gloo:all_to_all", 2, 5, tid=5),
        event("torch_shard: the gradient reduction of unit 'a'", 3, 4),
        event("gloo:all_to_all", 5, 8, tid=5),
        event("torch_shard: wait for the gradient reduction of unit 'a'", 7, 9),
    ]
    alone = [event("gloo:all_reduce", 6, 7, tid=6), event("gloo:all_reduce", 9, 10, tid=6)]

    def reductions(events: list[dict[str, Any]]) -> list[Any]:
        spans = ProfiledStep._from_events(events, ["a", "b"], False).timeline.spans
        return [(round(1000 * s.start, 6), round(1000 * s.end, 6), s.name) for s in spans if s.stream == "reduce"]

    step = event("ProfilerStep#1", 0, 20)
    assert reductions([step, *ours, *alone]) == [(2, 5, "b"), (5, 8, "a")]
    # With one more of the kind, each seems to run until the wait for it ends.
    assert reductions([step, *ours, event("gloo:all_to_all", 9, 10, tid=6)]) == [(1, 2, "b"), (3, 9, "a")]


def test_what_is_no_profile_of_an_engine_is_refused(tmp_path: Path) -> None:
    gather = event("torch_shard: the all-gather of unit 'a'", 1, 2)
    for text, on_device, message in (
        (None, False, r"none\.json: this can't be read as a trace .*FileNotFoundError"),
        ("no json", False, "can't be read as a trace"),
        ("[]", False, "can't be read as a trace"),
        ('{"traceEvents": null}', False, "can't be read as a trace"),
        ('{"traceEvents": [1]}', False, "can't be read as a trace"),
        ('{"traceEvents": [{"name": null, "ts": 1}]}', False, "can't be read as a trace"),
        (json.dumps({"traceEvents": [event("ProfilerStep#1", 0, 1)]}), False, "has no collective of this model"),
        (json.dumps({"traceEvents": []}), False, "has no collective of this model"),
        (json.dumps({"traceEvents": [gather]}), True, r"has no kernel .* ProfilerActivity\.CUDA"),
    ):
        path = tmp_path / "none.json"
        if text is not None:
            path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            ProfiledStep.read(path, ["a"], on_device)
