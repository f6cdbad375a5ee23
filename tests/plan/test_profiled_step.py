"""A step that torch.profiler has recorded: its streams, its memory and its waits, beside what was predicted of it."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile, schedule

import torch_shard
from tests.support.ranks import ranks
from torch_shard import ShardConfig
from torch_shard.errors import ConfigError
from torch_shard.plan import Search, search
from torch_shard.plan.pictures import Wait
from torch_shard.plan.profiled_step import ProfiledStep
from torch_shard.plan.step_trace import CollectiveStart

WIDTH, LAYERS, BATCH = 256, 4, 256


def blocks() -> nn.Sequential:
    return nn.Sequential(*[nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)])


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(BATCH, WIDTH)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad()


def profiled(path: Path) -> tuple[nn.Module, torch_shard.Engine, torch.optim.Optimizer]:
    """Train a few steps under full_shard, and leave a trace of two of them at `path`."""
    torch.manual_seed(0)
    model = blocks()
    engine = torch_shard.shard(model, ShardConfig(strategy="full_shard", prefetch=1))
    optimizer = torch.optim.AdamW(model.parameters())
    recorded = schedule(wait=0, warmup=4, active=2, repeat=1)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True, schedule=recorded) as profiler:
        for _ in range(6):
            step(model, optimizer)
            profiler.step()
    profiler.export_chrome_trace(str(path))
    return model, engine, optimizer


def predicted(ranks: int) -> Search:
    """Return a search whose first candidate is ``full_shard`` with a prefetch of one unit, for which memory just suffices."""
    model = blocks()
    optimizer = torch.optim.AdamW(model.parameters())

    def found(memory: int) -> Search:
        return search(
            model,
            lambda m: step(m, optimizer),
            memory=memory,
            ranks=ranks,
            on="cpu",
            optimizers=[optimizer],
            margin=0.0,
        )

    least = next(e.nbytes for e in found(1 << 40).estimates if str(e.candidate) == "full_shard, prefetch 1")
    return found(least)


@ranks(2, 3)
def test_a_profile_has_the_last_step_with_the_units_of_its_collectives(rank: int, tmp_path: Path) -> None:
    path = tmp_path / f"{rank}.json"
    model, engine, _ = profiled(path)
    found = ProfiledStep.read(path)
    names = [str(i) for i in range(LAYERS)]
    issued = [(kind, unit) for _, kind, unit in found.issued]
    assert [unit for kind, unit in issued if kind == "reduce_scatter"] == names[::-1]
    assert [unit for kind, unit in issued if kind == "all_gather"] == [
        *names,
        *names[-2:0:-1],
    ]  # nothing needs the first one
    seconds = [second for second, *_ in found.issued]
    assert seconds == sorted(seconds) and seconds[0] > 0 and seconds[-1] < found.timeline.total
    streams = {span.stream for span in found.timeline.spans}
    assert streams == {"compute", "gather", "reduce"}
    for span in found.timeline.spans:
        assert 0 <= span.start <= span.end
        if span.stream != "compute":  # it ran after it was issued
            assert span.start >= next(s for s, kind, unit in found.issued if (kind, unit) == (span.kind, span.name))
    assert {wait.unit for wait in found.waits} <= set(names) and sum(
        w.seconds for w in found.waits
    ) < found.timeline.total
    # Forward gathers two units at a time, and backward holds activations: what a step allocates, to a few small tensors.
    gathered = 2 * 4 * (WIDTH * WIDTH + WIDTH)
    assert max(nbytes for _, nbytes in found.memory) > gathered + LAYERS * BATCH * WIDTH * 4
    del model, engine


@ranks(2)
def test_measured_memory_is_drawn_over_what_was_predicted_of_the_same_step(rank: int, tmp_path: Path) -> None:
    search_result = predicted(2)
    path = tmp_path / f"{rank}.json"
    model, engine, optimizer = profiled(path)
    found = ProfiledStep.read(path)
    assert str(search_result.best.candidate) == "full_shard, prefetch 1"
    starts = [(e.kind, e.unit) for e in search_result.replay.step.events if isinstance(e, CollectiveStart)]
    assert starts == [(kind, unit) for _, kind, unit in found.issued]
    page = tmp_path / f"{rank}.html"
    engine.report(page, optimizer, profile=path, predicted=search_result)
    text = page.read_text()
    assert "memory of the profiled step" in text and "streams of the profiled step" in text
    assert "computing waits" in text and len(re.findall("<svg", text)) == 4
    assert ">measured<" in text and ">activation<" in text
    # Both begin with the same bytes, and the highest moment is that of the plan.
    states = sum(engine.memory_summary(optimizer)[kind] for kind in ("parameters", "gradients", "optimizer"))
    highest = states + max(nbytes for _, nbytes in found.memory)
    most = search_result.replay.step.peak().total
    # One tensor of the batch's size may be freed a moment later, when a thread of Gloo's lets go of it.
    assert 0.97 * most < highest < 1.03 * most + 4 * BATCH * WIDTH
    engine.report(page, optimizer, profile=path)
    assert ">measured<" in page.read_text() and ">activation<" not in page.read_text()
    del model


@ranks(2)
def test_what_was_predicted_is_put_where_the_same_collectives_were_started(rank: int, tmp_path: Path) -> None:
    replay = predicted(2).replay
    path = tmp_path / f"{rank}.json"
    model, *_ = profiled(path)
    found = ProfiledStep.read(path)
    clock = found.clock_for(replay)
    events = replay.step.events
    put = [second for second, event in zip(clock, events, strict=True) if isinstance(event, CollectiveStart)]
    assert put == pytest.approx([second for second, *_ in found.issued])
    assert clock == sorted(clock) and clock[0] == 0 and clock[-1] == pytest.approx(found.timeline.total)
    # Another step is stretched, evenly.
    other = ProfiledStep(found.timeline, (), (), found.issued[1:])
    ratio = found.timeline.total / replay.clock[-1]
    assert other.clock_for(replay) == pytest.approx([ratio * second for second in replay.clock])
    del model


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


def launched(kind: str, start: float, end: float, at: float, number: int, tid: int = 1) -> list[dict[str, Any]]:
    call = event("cudaLaunchKernel", at, at + 0.01, "cuda_runtime", tid, correlation=number)
    return [event(kind, start, end, "kernel", 7, correlation=number, stream=7), call]


def test_kernels_belong_to_the_ranges_in_which_they_were_launched() -> None:
    events = [
        event("ProfilerStep#3", 0, 20),
        event("torch_shard: the all-gather of unit 'a'", 1, 2),
        *launched("ncclDevKernel_AllGather", 3, 9, 1.5, 1),
        *launched("gemm", 2, 4, 2.5, 2),
        *launched("gemm", 9, 10, 2.6, 3),  # it has waited for the gather
        event("torch_shard: the gradient reduction of unit 'a'", 11, 12, tid=2),  # of the thread of a backward
        *launched("ncclDevKernel_ReduceScatter", 11.5, 13, 11.1, 4, tid=2),
        *launched("ncclDevKernel_AllReduce", 11.5, 13, 11.1, 5),  # of another thread: the user's own
        *launched("gemm", 18, 19, 17.5, 6),
        {"ph": "i", "name": "[memory]", "ts": 1e6 + 5e3, "args": {"Device Type": 1, "Bytes": 100}},
        {"ph": "i", "name": "[memory]", "ts": 1e6 + 5e3, "args": {"Device Type": 0, "Bytes": 7}},
        {"ph": "i", "name": "[memory]", "ts": 1e6 + 6e3, "args": {"Device Type": 1, "Bytes": -40}},
        event("gemm of the next step", 21, 22, "kernel", 7, correlation=9, stream=7),
    ]
    found = ProfiledStep._from(events)
    streams = {}
    for span in found.timeline.spans:
        streams.setdefault(span.stream, []).append((1000 * span.start, 1000 * span.end, span.name))
    assert [name for *_, name in streams["gather"]] == ["a"] and streams["gather"][0][:2] == pytest.approx((3, 9))
    assert [name for *_, name in streams["reduce"]] == ["a"]
    assert [start for start, *_ in streams["compute"]] == pytest.approx([2, 9, 11.5, 18])
    assert found.memory == [(pytest.approx(0.005), 100), (pytest.approx(0.006), 60)]
    lost = {(wait.kind, wait.unit): wait.seconds for wait in found.waits}
    assert lost == pytest.approx({("host", ""): 0.002 + 0.0015 + 0.005, ("all_gather", "a"): 0.005})
    assert found.waits == sorted(found.waits, reverse=True) and isinstance(found.waits[0], Wait)
    assert found.timeline.total == pytest.approx(0.020)


def test_what_is_no_profile_of_an_engine_is_refused(tmp_path: Path) -> None:
    for text, message in (
        (None, r"none\.json: this can't be read as a trace .*FileNotFoundError"),
        ("no json", "can't be read as a trace"),
        ("[]", "can't be read as a trace"),
        (json.dumps({"traceEvents": [event("ProfilerStep#1", 0, 1)]}), "has no collective of a sharded model"),
        (json.dumps({"traceEvents": []}), "has no collective of a sharded model"),
    ):
        path = tmp_path / "none.json"
        if text is not None:
            path.write_text(text)
        with pytest.raises(ConfigError, match=message):
            ProfiledStep.read(path)
