"""Memory: what a rank holds, and the peak of a step, against what is predicted before anything is allocated."""

from __future__ import annotations

import functools
from typing import Any

import torch

from ..config.precision import Precision, has_bf16
from ..config.shard_config import ShardConfig
from ..engine import Engine, shard
from ..plan.device_memory import reserved_by
from ..plan.planner import make_plan
from ..plan.sharded_step import sharded_step
from ..plan.trace_for import trace_for
from .allocated import held, peak_of
from .context import Case, Context, Setting
from .model import Block, Size, batch, make, mean_loss
from .ranks import PATIENCE
from .results import NO_BF16, Result, at_most, skipped, within

_STEPS = 3  # the first makes the optimizer's state, the second learns the order of gathers
_TRIES = 3  # of the peak; on the CPU what the threads of Gloo free is not seen, which only makes it seem higher
_SLACK = 1.05  # of the predicted peak: the margin of a plan
_WORKSPACES = 64 << 20  # on GPUs: those of cuBLAS, which count as allocated (8 MiB for a stream, 32 on Hopper)
_UNSEEN = 256 << 10  # on the CPU: what may have been freed without being seen


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
    before = held(ranks.device)
    data = batch(size, ranks.device, 0, ranks.rank)
    config = ShardConfig(strategy=strategy, precision=precision, units=[Block], timeout=PATIENCE)
    model = make(size, ranks.device)
    engine = shard(model, config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    plan = engine.plan.predicted
    for _ in range(_STEPS):
        engine.reset_peak_gathered()
        mean_loss(model, data).backward()
        kept = engine.memory_summary()
        optimizer.step()
        optimizer.zero_grad()
    measured = {
        "parameters": (kept["parameters"], plan.parameters),
        "gradients": (kept["gradients"], plan.gradients),
        "optimizer state": (_moments(engine, optimizer), plan.optimizer),
        "gathered at most": (engine.statistics().peak_gathered, plan.gathered_peak),
    }
    step = functools.partial(_step, model, data, optimizer)
    peak = min(peak_of(step, ranks.device)[0] for _ in range(_TRIES)) - before
    engine.close(optimizer)
    results = []
    for what, pair in measured.items():
        own, predicted = max(ranks.gather(pair), key=lambda each: abs(each[0] - each[1]))
        results.append(within(case.part, f"{case.name}: {what}", own, predicted, 0.0, "bytes"))
    pair = peak, _predicted_peak(size, config, context)
    own, predicted = max(ranks.gather(pair), key=lambda each: each[0] / each[1])
    most = _SLACK * predicted + (_WORKSPACES if ranks.device.type == "cuda" else _UNSEEN)
    results.append(at_most(case.part, f"{case.name}: peak of a step", own, most, "bytes", predicted=predicted))
    return results


def _step(model: Any, data: Any, optimizer: torch.optim.Optimizer) -> None:
    mean_loss(model, data).backward()
    optimizer.step()
    optimizer.zero_grad()


def _predicted_peak(size: Size, config: ShardConfig, context: Context) -> int:
    """Return the most bytes that a step takes on this rank, as ``torch-shard plan`` predicts them."""
    ranks = context.ranks
    plain = make(size, torch.device("meta"))
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    data = batch(size, torch.device("cpu"), 0, ranks.rank)
    plan = make_plan(plain, config, ranks.world)
    step = functools.partial(_step, data=data, optimizer=optimizer)
    on: Any = ranks.device.type
    trace = trace_for(plain, step, plan, config, device=on, optimizers=[optimizer])
    replayed = sharded_step(trace, plan, config, rank=ranks.rank)
    return reserved_by(replayed).peak_allocated if on == "cuda" else replayed.peak().total


def _moments(engine: Engine, optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes of the optimizer's moments: of its state without the 0-d counters of steps, which the plan leaves out."""
    entries = [value for state in optimizer.state.values() for value in state.values()]
    counters = sum(value.nbytes for value in entries if isinstance(value, torch.Tensor) and value.dim() == 0)
    return engine.memory_summary(optimizer)["optimizer"] - counters
