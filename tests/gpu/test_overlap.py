"""Communication runs beside compute, and the host runs ahead of the device."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import torch_shard
from tests.gpu.models import GPT, Block, tokens, train_step
from tests.support.ranks import ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and torch sees none here")

UNITS = 8
STEPS = 2


class Wide(nn.Module):
    """Milliseconds of compute, and a gather that takes about as long or less."""

    def __init__(self, width: int = 2048) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.relu(self.up(x)))


@dataclass(frozen=True)
class Kernel:
    name: str
    start: float  # microseconds
    end: float

    def overlaps(self, other: Kernel) -> bool:
        return self.start < other.end and other.start < self.end


def kernels(profile: Any, path: Path) -> list[Kernel]:
    """What ran on the GPU, from the trace in Chrome's format: its fields are the same in all versions of torch."""
    profile.export_chrome_trace(str(path))
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return [
        Kernel(e["name"].lower(), float(e["ts"]), float(e["ts"]) + float(e["dur"]))
        for e in events
        if e.get("ph") == "X" and e.get("cat") == "kernel"
    ]


def trace_training(rank: int, device: torch.device, folder: Path) -> list[Kernel]:
    torch.manual_seed(0)
    model = nn.Sequential(*(Wide() for _ in range(UNITS))).to(device)
    torch_shard.shard(model, units=[Wide], timeout=60.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    x = torch.randn(4096, 2048, device=device)

    def step() -> None:
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(4):  # until every gather is remembered and edits of gathered values are no longer looked for
        step()
    torch.cuda.synchronize(device)
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        dist.all_reduce(torch.zeros(1))  # on the CPU: starting the profiler takes long, and not equally long
        for _ in range(STEPS):
            step()
        torch.cuda.synchronize(device)
    found = kernels(profile, folder / f"{rank}.json")
    if not found:
        pytest.skip("the profiler sees no kernels here: it needs the right to read the GPU's counters")
    return found


@ranks(2, backend="nccl", timeout=400)
def test_the_next_unit_is_gathered_while_this_one_computes(rank, device, tmp_path):
    found = trace_training(rank, device, tmp_path)
    compute = [k for k in found if "nccl" not in k.name]
    gathers = [k for k in found if "nccl" in k.name and "allgather" in k.name]
    assert len(gathers) >= STEPS * (2 * UNITS - 2), "each unit in forward, and all but the last again in backward"
    beside = [k for k in gathers if any(k.overlaps(c) for c in compute)]
    # The first gather of a forward has nothing to hide behind.
    assert len(beside) > 0.6 * len(gathers), f"{len(beside)} of {len(gathers)} gathers ran beside compute"


@ranks(2, backend="nccl", timeout=400)
def test_gradients_are_reduced_while_the_next_unit_computes(rank, device, tmp_path):
    found = trace_training(rank, device, tmp_path)
    compute = [k for k in found if "nccl" not in k.name]
    reductions = [k for k in found if "nccl" in k.name and "reducescatter" in k.name]
    assert len(reductions) == STEPS * UNITS
    beside = [k for k in reductions if any(k.overlaps(c) for c in compute)]
    assert len(beside) > 0.6 * len(reductions), f"{len(beside)} of {len(reductions)} reductions ran beside compute"


def warmed_up(rank: int, device: torch.device) -> tuple[nn.Module, Any, torch.optim.Optimizer]:
    """A sharded GPT, its engine and its optimizer, after some steps: the first look for edits of gathered values, which
    is a wait."""
    torch.manual_seed(0)
    model = GPT(width=48).to(device)
    engine = torch_shard.shard(model, units=[Block], timeout=60.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(5):
        train_step(model, optimizer, tokens(rank, step, device), engine)
    torch.cuda.synchronize(device)
    return model, engine, optimizer


@ranks(1, 2, backend="nccl", timeout=240)
def test_no_call_in_a_step_synchronises_with_the_device(rank, device):
    model, engine, optimizer = warmed_up(rank, device)
    batches = [tokens(rank, step, device) for step in range(3)]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for x in batches:
            train_step(model, optimizer, x, engine)
    finally:
        torch.cuda.set_sync_debug_mode("default")


def assert_runs_ahead(device: torch.device, what: Callable[[], Any]) -> Any:
    """Call `what` while the device is busy with something else for 0.3 s or more: the call must return before that.

    The debug mode above sees calls that block, but not a host that asks an event again and again.
    """
    torch.cuda.synchronize(device)
    dist.all_reduce(torch.zeros(1))  # on the CPU: the ranks begin together
    begin = time.perf_counter()
    torch.cuda._sleep(600_000_000)  # cycles, of at most 2 GHz
    result = what()
    host = time.perf_counter() - begin
    torch.cuda.synchronize(device)
    busy = time.perf_counter() - begin
    assert busy > 0.25, "the device was not busy for long enough to show anything"
    assert host < 0.6 * busy, f"the host came back after {host:.3f} s, the device after {busy:.3f} s"
    return result


@ranks(1, 2, backend="nccl", timeout=240)
def test_the_host_runs_ahead_of_a_busy_device_in_forward_clipping_and_step(rank, device):
    model, engine, optimizer = warmed_up(rank, device)
    model(
        tokens(rank, 5, device)
    ).square().mean()  # CUDA loads a kernel when it is first used, and waits for the device then
    for step in range(3):
        x = tokens(rank, 5 + step, device)
        loss = assert_runs_ahead(device, lambda x=x: model(x).square().mean())
        loss.backward()
        assert_runs_ahead(device, lambda: engine.clip_grad_norm_(1.0))
        assert_runs_ahead(device, optimizer.step)
        optimizer.zero_grad()


@ranks(1, backend="nccl", timeout=240)
def test_the_host_of_one_rank_runs_ahead_of_a_busy_device_in_a_whole_step(rank, device):
    """With more ranks backward follows the device on purpose: two reductions in flight at most (`wait_for_own_part`)."""
    model, engine, optimizer = warmed_up(rank, device)
    for step in range(3):
        x = tokens(rank, 5 + step, device)
        assert_runs_ahead(device, lambda x=x: train_step(model, optimizer, x, engine))
