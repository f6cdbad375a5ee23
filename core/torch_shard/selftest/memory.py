"""Memory: what a rank holds, and its peak, against the numbers that the plan predicts before anything is allocated."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..config.precision import Precision
from ..engine import Engine, shard
from .context import Case, Context, Setting
from .devices import has_bf16, peak_memory, reset_peak_memory
from .model import Block, Size, batch, make, mean_loss
from .ranks import PATIENCE
from .results import NO_BF16, Result, at_most, skipped, within

__all__ = ["memory_cases"]

STEPS = 3  # the first makes the optimizer's state, the second learns the order of gathers
SLACK = 1.1  # of the device's peak: allocators round up, and the plain model's activations are an estimate of the sharded one's


def memory_cases(setting: Setting) -> list[Case]:
    """Return a case for each strategy without replicas, in fp32 and in mixed precision."""
    cases = []
    for strategy in ("full_shard", "shard_grad_op", "shard_optim", "no_shard"):
        for name, precision in (("fp32", None), ("bf16 reduced in fp32", Precision(torch.bfloat16, torch.float32))):
            run = functools.partial(_compare, strategy, precision)
            cases.append(Case("memory", f"{strategy}, {name}", run))
    return cases


def _size(setting: Setting) -> Size:
    # Few tokens, so that parameters, which the plan is about, take most of the memory.
    if setting.kind == "cuda":
        return Size(layers=12, width=1024, heads=16, context=16, vocab=1024, batch=1)
    return Size(layers=4, width=64 if setting.quick else 256, heads=4, context=16, vocab=256, batch=1)


def _compare(strategy: Any, precision: Precision | None, context: Context, case: Case) -> list[Result]:
    """Train for some steps, and return one result for each number. Each is that of the rank that is furthest off."""
    ranks, size = context.ranks, _size(context.setting)
    if precision is not None and not has_bf16(ranks.device):
        return [skipped(case.part, case.name, NO_BF16)]
    data = batch(size, ranks.device, 0, ranks.rank)
    on_gpu = ranks.device.type == "cuda"
    activations = _activations(size, data, precision) if on_gpu else 0
    model = make(size, ranks.device)
    engine = shard(model, strategy=strategy, precision=precision, units=[Block], timeout=PATIENCE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    plan = engine.plan.predicted
    peak = before = 0
    for _ in range(STEPS):
        engine.reset_peak_gathered()
        before = reset_peak_memory(ranks.device) if on_gpu else 0
        mean_loss(model, data).backward()
        peak = peak_memory(ranks.device) if on_gpu else 0  # what the optimizer's kernels take besides is not the plan's
        held = engine.memory_summary()
        optimizer.step()
        optimizer.zero_grad()
    measured = {
        "parameters": (held["parameters"], plan.parameters),
        "gradients": (held["gradients"], plan.gradients),
        "optimizer state": (_moments(engine, optimizer), plan.optimizer),
        "gathered at most": (engine.statistics().peak_gathered, plan.gathered_peak),
    }
    limit = before + plan.gradients + plan.gathered_peak + plan.gradient_peak + activations
    engine.close(optimizer)
    results = []
    for what, pair in measured.items():
        own, predicted = max(ranks.gather(pair), key=lambda each: abs(each[0] - each[1]))
        results.append(within(case.part, f"{case.name}: {what}", own, predicted, 0.0, "bytes"))
    if on_gpu:
        own, most = max(ranks.gather((peak, limit)), key=lambda each: each[0] / each[1])
        name = f"{case.name}: allocated on the device in forward and backward"
        results.append(at_most(case.part, name, own, SLACK * most, "bytes", predicted=most, activations=activations))
    return results


def _moments(engine: Engine, optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of the optimizer's moments: of its state without the 0-d counters of steps, which the plan leaves out."""
    entries = [value for state in optimizer.state.values() for value in state.values()]
    counters = sum(value.nbytes for value in entries if isinstance(value, torch.Tensor) and value.dim() == 0)
    return engine.memory_summary(optimizer)["optimizer"] - counters


def _activations(size: Size, data: Any, precision: Precision | None) -> int:
    """Return the bytes that a forward of the plain model adds on a GPU."""
    model = make(size, data[0].device).to(torch.float32 if precision is None else precision.param_dtype)
    mean_loss(model, data).backward()  # once for the work space of libraries
    before = reset_peak_memory(data[0].device)
    loss = mean_loss(model, data)
    peak = peak_memory(data[0].device)
    del loss
    return peak - before
