"""Predicted memory beside measured memory: the peak of a step on each rank.

    python bench/prediction.py                  150 cases on this machine's CPU, over Gloo
    python bench/prediction.py --held-out       the 50 that nothing was tuned on
    python bench/prediction.py --limit 12       to try the script
    python bench/prediction.py --only gpt2,t5 --verbose
    python bench/prediction.py --large          ten that take 500 MB and more, and what the process takes of the machine

The cases are pairs of settings in all combinations: models, strategies, precision, checkpointing, optimizers, ranks. They are
drawn with a seed that was fixed before anything was tuned. What is measured is the level of the allocator's events, which the
profiler records, in the fourth step; the prediction shares no code with it. What a process takes of the machine is its largest
resident size in that step; it is compared with the prediction and what was resident before there was a model.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import itertools
import json
import os
import platform
import random
import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from prediction_models import LARGE_MODELS, MODELS, Training

import torch_shard
from torch_shard.plan.planner import make_plan
from torch_shard.plan.sharded_step import sharded_step
from torch_shard.plan.step_trace import KINDS, Peak
from torch_shard.plan.trace_for import trace_for
from torch_shard.selftest.allocated import peak_of

SEED, CASES, HELD_OUT = 20261127, 200, 50
UNSEEN, TRIES = 1 << 18, 10  # bytes that may be freed without the profiler's noticing, and how often a step is measured
UNSEEN_PART = 1 / 500  # of the peak, if that is more

STRATEGIES = ("full_shard", "shard_grad_op", "shard_optim", "no_shard")
PRECISIONS = ("fp32", "bf16", "autocast", "autocast alone")
OPTIMIZERS = ("AdamW", "SGD", "momentum", "Adagrad")
RANKS = (1, 2, 3, 4)


@dataclass(frozen=True)
class Case:
    """One training; see the constants above for the choices."""

    model: str
    strategy: str
    precision: str
    checkpointing: bool
    optimizer: str
    ranks: int
    micro_batches: int
    large: bool = False

    def __str__(self) -> str:
        more = [self.precision, self.optimizer, f"{self.ranks} ranks"]
        more += ["checkpointing"] * self.checkpointing + ["accumulation"] * (self.micro_batches > 1)
        return f"{self.model}, {self.strategy}, {', '.join(more)}"


def cases() -> list[Case]:
    """Return all cases: each pair of two settings' values is in some, as far as they go; the same in every run."""
    values = [list(MODELS), STRATEGIES, PRECISIONS, (False, True), OPTIMIZERS, RANKS, (1, 2)]
    left = {
        ((i, a), (j, b)) for i, j in itertools.combinations(range(len(values)), 2) for a in values[i] for b in values[j]
    }
    draw = random.Random(SEED)
    found: dict[Case, None] = {}
    while len(found) < CASES:
        # The best of some candidates, as AETG chooses test cases (Cohen et al., 1997).
        candidates = [tuple(draw.choice(list(choices)) for choices in values) for _ in range(30)]
        best = max(candidates, key=lambda c: len(left & set(itertools.combinations(enumerate(c), 2))))
        left -= set(itertools.combinations(enumerate(best), 2))
        found[Case(*best)] = None  # type: ignore[arg-type]
    shuffled = list(found)
    draw.shuffle(shuffled)
    return shuffled


def large_cases() -> list[Case]:
    """Return cases of the large models, two of each, which together have all strategies and optimizers."""
    values = [list(LARGE_MODELS) * 2, STRATEGIES, ("fp32", "autocast"), (False, True), OPTIMIZERS]
    draw = random.Random(SEED)
    columns = [[column[n % len(column)] for n in range(len(values[0]))] for column in values]
    for column in columns[1:]:
        draw.shuffle(column)
    return [Case(*row, ranks=2, micro_batches=1, large=True) for row in zip(*columns, strict=True)]  # type: ignore[misc]


def config_of(case: Case) -> torch_shard.ShardConfig:
    precision = None
    if case.precision == "autocast":
        precision = torch_shard.Precision(torch.bfloat16, cast_inputs=False, cast_params="autocast")
    elif case.precision == "bf16":
        precision = torch_shard.Precision(torch.bfloat16)
    return torch_shard.ShardConfig(strategy=case.strategy, precision=precision, timeout=600)


def optimizer_of(case: Case, parameters: Any) -> torch.optim.Optimizer:
    parameters = [p for p in parameters if p.requires_grad]
    if case.optimizer == "AdamW":
        return torch.optim.AdamW(parameters, lr=1e-4)
    if case.optimizer == "Adagrad":
        return torch.optim.Adagrad(parameters, lr=1e-4)
    return torch.optim.SGD(parameters, lr=1e-4, momentum=0.9 if case.optimizer == "momentum" else 0.0)


def training_of(case: Case) -> Training:
    torch.manual_seed(0)
    return (LARGE_MODELS if case.large else MODELS)[case.model](case.checkpointing)


def step_of(case: Case, training: Training, optimizer: torch.optim.Optimizer, model: Any) -> None:
    optimizer.zero_grad()
    for _ in range(case.micro_batches):
        with torch.autocast("cpu", torch.bfloat16, enabled="autocast" in case.precision):
            loss = training.loss(model)
        loss.backward()
        del loss
    optimizer.step()


# -- measured, on the ranks ------------------------------------------------------------------------


def measured(case: Case) -> int:
    """Return the most bytes that a step has allocated on this rank, with all that was there before. Collective."""
    training = training_of(case)
    torch_shard.shard(training.model, config_of(case))
    optimizer = optimizer_of(case, training.model.parameters())
    for _ in range(3):
        step_of(case, training, optimizer, training.model)
    peaks = []
    for _ in range(TRIES):
        peak, unseen = peak_of(lambda: step_of(case, training, optimizer, training.model), torch.device("cpu"))
        peaks.append(peak)
        excess = torch.tensor(float(unseen - max(UNSEEN, UNSEEN_PART * peak)))
        dist.all_reduce(excess, dist.ReduceOp.MAX)
        if excess < 0:
            return peak
    return min(peaks)


def resident(field: str = "VmRSS") -> int:
    """Return the bytes of physical memory that this process has; ``VmHWM``: the most it ever had."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{field}:"))


def most_resident(case: Case) -> tuple[int, int]:
    """Return the bytes of memory of this process before there was a model, and the most in a step. Collective."""
    training_of(dataclasses.replace(case, large=False))  # imports what the model needs
    gc.collect()
    before = resident()
    training = training_of(case)
    torch_shard.shard(training.model, config_of(case))
    optimizer = optimizer_of(case, training.model.parameters())
    for _ in range(3):
        step_of(case, training, optimizer, training.model)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM begins anew, see proc(5)
    step_of(case, training, optimizer, training.model)
    return before, resident("VmHWM")


def run(rank: int, chosen: list[Case], folder: str, what: Callable[[Case], Any]) -> None:
    torch.set_num_threads(1)
    ranks = chosen[0].ranks
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=ranks)
    for number, case in enumerate(chosen):
        here = what(case)
        gc.collect()
        everywhere: list[Any] = [None] * ranks
        dist.all_gather_object(everywhere, here)
        if rank == 0:
            Path(folder, f"{number}.json").write_text(json.dumps(everywhere))
    dist.destroy_process_group()


def on_ranks(chosen: list[Case], what: Callable[[Case], Any] = measured) -> list[list[Any]]:
    """Return what a function returns on each rank, for cases with one number of ranks."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (chosen, folder, what), nprocs=chosen[0].ranks)
        return [json.loads(Path(folder, f"{number}.json").read_text()) for number in range(len(chosen))]


# -- predicted -------------------------------------------------------------------------------------


def predicted(case: Case) -> list[Peak]:
    """Return the predicted peak of each rank."""
    training = training_of(case)
    optimizer = optimizer_of(case, training.model.parameters())
    config = config_of(case)
    plan = make_plan(training.model, config, case.ranks)
    trace = trace_for(
        training.model, lambda model: step_of(case, training, optimizer, model), plan, config, optimizers=[optimizer]
    )
    return [sharded_step(trace, plan, config, rank=rank).peak() for rank in range(case.ranks)]


def report(results: list[tuple[Case, list[Peak], list[int]]]) -> None:
    errors = []  # of each case: that of the rank whose prediction is lowest, and highest
    for case, peaks, found in results:
        off = [peak.total / real - 1 for peak, real in zip(peaks, found, strict=True)]
        errors.append((min(off), max(off), case))
    sizes = sorted(max(-low, high) for low, high, _ in errors)
    two, five = (sum(size <= part for size in sizes) for part in (0.02, 0.05))
    print(f"\n{len(errors)} cases; of each the rank with the largest error. Median {statistics.median(sizes):.2%}, ")
    print(f"95th percentile {sizes[int(0.95 * (len(sizes) - 1))]:.2%}, largest {sizes[-1]:.2%}.")
    print(f"{two} are within 2 %, {five} within 5 %.")
    print(
        f"Lowest prediction {min(low for low, *_ in errors):+.2%}, highest {max(high for _, high, _ in errors):+.2%}."
    )
    print(f"Predicted more than 5 % too low on some rank: {sum(low < -0.05 for low, *_ in errors)}.")
    for low, high, case in sorted(errors, key=lambda e: -max(-e[0], e[1]))[:10]:
        print(f"  {low:+.2%} to {high:+.2%}  {case}")


def report_resident(results: list[tuple[Case, list[Peak], list[int]]]) -> None:
    """Print what the processes take of the machine; each case is measured in processes of its own."""
    print("\nResident size of the process, predicted with what was resident before the model:")
    os.environ["MALLOC_MMAP_THRESHOLD_"] = str(
        1 << 20
    )  # blocks from 1 MiB on go back to the system when they are freed
    sizes = []
    for case, peaks, _ in results:
        ranks = on_ranks([case], most_resident)[0]
        off = [(before + peak.total) / most - 1 for peak, (before, most) in zip(peaks, ranks, strict=True)]
        sizes.append(abs(max(off, key=abs)))
        before, most = ranks[0]
        print(f"{max(off, key=abs):+.2%} of {most / 2**20:,.0f} MiB, of which {before / 2**20:,.0f} before  {case}")
    print(
        f"{sum(size <= 0.1 for size in sizes)} of {len(sizes)} are within 10 %; the largest error is {max(sizes):.2%}."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--held-out", action="store_true", help="the 50 cases that nothing was tuned on")
    parser.add_argument("--large", action="store_true", help="ten cases of 500 MB and more, with two ranks")
    parser.add_argument("--limit", type=int, help="the first of the cases only")
    parser.add_argument("--only", help=f"some of: {','.join(MODELS)}")
    parser.add_argument(
        "--ranks", type=int, choices=RANKS, action="append", help="those with this number of ranks only"
    )
    parser.add_argument("--verbose", action="store_true", help="print each case")
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    torch.set_num_threads(1)
    chosen = cases()
    chosen = large_cases() if args.large else chosen[-HELD_OUT:] if args.held_out else chosen[:-HELD_OUT]
    if args.only:
        chosen = [case for case in chosen if case.model in args.only.split(",")]
    chosen = chosen[: args.limit]
    if args.ranks:
        chosen = [case for case in chosen if case.ranks in args.ranks]
    print(
        f"{len(chosen)} cases; torch {torch.__version__}, Python {platform.python_version()}, {date.today()}",
        flush=True,
    )
    results: list[tuple[Case, list[Peak], list[int]]] = []
    for ranks in RANKS:
        of_these = [case for case in chosen if case.ranks == ranks]
        found = on_ranks(of_these) if of_these else []
        for case, real in zip(of_these, found, strict=True):
            peaks = predicted(case)
            results.append((case, peaks, real))
            if args.verbose:
                off = [peak.total / each - 1 for peak, each in zip(peaks, real, strict=True)]
                print(f"{max(off, key=abs):+.2%} of {max(real) / 2**20:,.1f} MiB  {case}", flush=True)
                kinds = {kind: f"{peaks[0].kinds[kind] / 2**20:.2f}" for kind in KINDS if peaks[0].kinds[kind]}
                print(f"    {[f'{each / 2**20:.2f}' for each in real]} {kinds}", flush=True)
    report(results)
    if args.large:
        report_resident(results)


if __name__ == "__main__":
    main()
