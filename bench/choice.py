"""The settings that the plan's search chooses, beside the fastest of twelve that are measured.

    python bench/choice.py                      five models on two ranks of this machine, over Gloo
    python bench/choice.py --models gpt2 --rounds 3

Each model trains under six strategies, with and without activation checkpointing, in turns. Three budgets of memory are asked
of the search: one that all twelve fit, and two that fewer fit. It gets this machine's figures, which are measured first.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from prediction_models import MODELS, Training

import torch_shard
from torch_shard.activation_checkpointing import checkpointed_layers
from torch_shard.plan.devices import Device, Link
from torch_shard.plan.search_results import Candidate
from torch_shard.selftest.allocated import peak_of

CHOSEN = ("mlp", "gpt2", "llama", "distilbert", "mixtral")
STRATEGIES = (
    *(Candidate("full_shard", prefetch=prefetch) for prefetch in (0, 1, 2)),
    *(Candidate(strategy) for strategy in ("shard_grad_op", "shard_optim", "no_shard")),
)
CANDIDATES = [
    Candidate(each.strategy, prefetch=each.prefetch, checkpointing=checkpointing)
    for checkpointing in (False, True)
    for each in STRATEGIES
]
MARGIN = 0.05


@dataclass
class Measured:
    """What a candidate took on the rank that took most: the median of its steps in seconds, and the most bytes in one."""

    seconds: float
    nbytes: int


def step_of(training: Training, model: Any, optimizer: torch.optim.Optimizer) -> None:
    training.loss(model).backward()
    optimizer.step()
    optimizer.zero_grad()


# -- on the ranks ----------------------------------------------------------------------------------


def seconds_of(work: Callable[[], object], least: float = 0.3) -> float:
    """Return the seconds of one call, on this rank while the others do the same."""
    work()
    calls = 1
    while True:
        dist.barrier()
        start = time.perf_counter()
        for _ in range(calls):
            work()
        taken = torch.tensor(time.perf_counter() - start)
        dist.all_reduce(taken, dist.ReduceOp.MAX)
        if taken > least:
            return float(taken) / calls
        calls *= 2


def figures() -> dict[str, float]:
    """Return what this machine reaches with all ranks at work. Collective."""
    ranks = dist.get_world_size()
    a, b = torch.randn(512, 512), torch.randn(512, 512)
    long, small = torch.randn(1 << 23), torch.randn(8)
    product = seconds_of(lambda: torch.mm(a, b))
    update = seconds_of(lambda: long.mul_(1.0))
    operator = seconds_of(lambda: small.add_(1.0))
    shard, parts = torch.randn(1 << 21), torch.empty(ranks << 21)
    gather = seconds_of(lambda: dist.all_gather_into_tensor(parts, shard))
    little, littles = torch.randn(8), torch.empty(8 * ranks)
    message = seconds_of(lambda: dist.all_gather_into_tensor(littles, little))
    return {
        "flops": 2 * 512**3 / product,
        "memory": 2 * long.nbytes / update,
        "operator": operator,
        "link": shard.nbytes * (ranks - 1) / gather,
        "latency": message / (ranks - 1),
    }


def training_of(model: str) -> Training:
    torch.manual_seed(0)
    return MODELS[model](False)


def shard_and_warm(model: str, candidate: Candidate) -> tuple[Training, torch.optim.Optimizer]:
    training = training_of(model)
    with checkpointed_layers(training.model, bool(candidate.checkpointing), units=None):
        torch_shard.shard(training.model, candidate.config(torch_shard.ShardConfig(timeout=600)))
    optimizer = torch.optim.AdamW(training.model.parameters(), lr=1e-4)
    for _ in range(3):
        step_of(training, training.model, optimizer)
    return training, optimizer


def peak(model: str, candidate: Candidate) -> int:
    """Return the most bytes that a step takes on this rank. Collective."""
    training, optimizer = shard_and_warm(model, candidate)
    # The least of some steps: what Gloo's threads free isn't seen, and makes a peak too high.
    return min(peak_of(lambda: step_of(training, training.model, optimizer), torch.device("cpu"))[0] for _ in range(3))


def measure(model: str, rounds: int) -> list[Measured]:
    """Train with all candidates; the seconds are of steps in turns. Collective."""
    peaks = torch.tensor([peak(model, candidate) for candidate in CANDIDATES])
    dist.all_reduce(peaks, dist.ReduceOp.MAX)
    trainings = [shard_and_warm(model, candidate) for candidate in CANDIDATES]
    seconds: list[list[float]] = [[] for _ in CANDIDATES]
    for _ in range(rounds):
        for of_this, (training, optimizer) in zip(seconds, trainings, strict=True):
            dist.barrier()
            start = time.perf_counter()
            step_of(training, training.model, optimizer)
            dist.barrier()
            of_this.append(time.perf_counter() - start)
    medians = torch.tensor([statistics.median(of_this) for of_this in seconds])
    dist.all_reduce(medians, dist.ReduceOp.MAX)
    return [Measured(float(s), int(n)) for s, n in zip(medians, peaks, strict=True)]


def run(rank: int, ranks: int, models: list[str], rounds: int, folder: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=ranks)
    found = {"figures": figures(), "models": {name: [vars(m) for m in measure(name, rounds)] for name in models}}
    if rank == 0:
        Path(folder, "found.json").write_text(json.dumps(found))
    dist.destroy_process_group()


# -- the search ------------------------------------------------------------------------------------


def choose(model: str, budget: int, ranks: int, figures: dict[str, float]) -> Candidate | None:
    """Return what the search chooses for a budget in bytes, or None if nothing seems to fit."""
    training = training_of(model)
    optimizer = torch.optim.AdamW(training.model.parameters(), lr=1e-4)
    memory = figures["memory"]
    machine = Device(
        "this machine",
        {"fp32": figures["flops"]},
        memory,
        1e12,
        matmul_fraction=1.0,
        memory_fraction=1.0,
        launch_seconds=0.0,
        host_seconds=figures["operator"],
    )
    found = torch_shard.plan.search(
        training.model,
        lambda model: step_of(training, model, optimizer),
        memory=round(budget / (1 - MARGIN)),
        ranks=ranks,
        optimizers=[optimizer],
        device=machine,
        on="cpu",
        intra=Link("Gloo", figures["link"], figures["latency"]),
        margin=MARGIN,
    )
    return found.estimates[0].candidate if found.estimates[0].fits else None


def budgets(found: list[Measured]) -> list[int]:
    """Return a budget that all candidates fit, one for half of them, and one for a quarter."""
    sizes = sorted(each.nbytes for each in found)
    half, quarter = len(sizes) // 2, len(sizes) // 4
    between = [(sizes[n - 1] + sizes[n]) // 2 for n in (half, quarter)]
    return [2 * sizes[-1], *between]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--models", default=",".join(CHOSEN), help="of those with layers of one class that repeat")
    parser.add_argument("--rounds", type=int, default=9, help="timed steps of each candidate")
    parser.add_argument("--ranks", type=int, default=2)
    args = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    torch.set_num_threads(1)
    models = args.models.split(",")
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(run, (args.ranks, models, args.rounds, folder), nprocs=args.ranks)
        found = json.loads(Path(folder, "found.json").read_text())
    figures = found["figures"]
    print(f"{args.ranks} ranks; torch {torch.__version__}, Python {platform.python_version()}, {date.today()}")
    print({name: float(f"{value:.3g}") for name, value in figures.items()})
    good = asked = 0
    for model in models:
        measured = [Measured(**each) for each in found["models"][model]]
        print(f"\n{model}:")
        for candidate, each in zip(CANDIDATES, measured, strict=True):
            print(f"  {each.seconds:.4f} s  {each.nbytes / 2**20:7.1f} MiB  {candidate}")
        for budget in budgets(measured):
            fitting = [each for each in zip(measured, CANDIDATES, strict=True) if each[0].nbytes <= budget]
            fastest, candidate = min(fitting, key=lambda each: each[0].seconds)
            chosen = choose(model, budget, args.ranks, figures)
            taken = dict(zip(CANDIDATES, measured, strict=True))[chosen] if chosen is not None else None
            asked += 1
            verdict = "nothing chosen"
            if taken is not None:
                fits = taken.nbytes <= budget
                good += fits and taken.seconds <= 1.1 * fastest.seconds
                verdict = (
                    f"chosen: {chosen}, {taken.seconds / fastest.seconds - 1:+.1%}{'' if fits else ', DOES NOT FIT'}"
                )
            print(f"  {budget / 2**20:,.1f} MiB: fastest is {candidate}; {verdict}")
    print(f"\n{good} of {asked} choices fit and are within 10 % of the fastest that fits.")


if __name__ == "__main__":
    main()
