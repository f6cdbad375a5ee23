"""Optimizer steps alone: their time and their memory, beside those of the peers.

    python bench/optim.py                      everything
    python bench/optim.py --short              fewer repetitions, FSDP2 the only peer
    python bench/optim.py --what small,muon    some of the tables

=============  =====================================================================================
small          AdamW's step and clipping on 64 small layers, 8 ranks of a fake process group
billion        AdamW's step on one rank's part of 1B parameters, 64 ranks of a fake process group
rank46         AdamW's step on 46M parameters, 2 Gloo ranks, beside that of the unsharded model
muon           Muon's and AdamW's step on 100M parameters, 2 Gloo ranks, beside the unsharded model
memory         peak memory within a step, 46M parameters, 2 Gloo ranks
in_backward    steps within backward: time and memory beside the ordinary order, 46M, 2 Gloo ranks
=============  =====================================================================================

On the fake process group one process plays one rank of many: `small` gives its CPU time, of the first
and of the last rank, whose slices differ; `billion` gives wall time. Each engine runs in several
processes, in turns with the others. The 2 Gloo ranks hold all engines at once, which take turns step
by step (:mod:`optim_ranks`). "default" is torch's own choice of AdamW's implementation. AdamW has
the usual two groups: matrices decay, the rest does not.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from datetime import date
from typing import Any

import torch
import torch.distributed as dist
from engines import LABELS, decay_groups, wrap, wrap_from_meta
from gpt import GPT
from optim_ranks import IMPLEMENTATIONS, reason, report_in_backward, report_memory, report_muon, report_rank46
from overhead import BILLION, LAYERS, WIDTH, Stack, cpu, fill
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore
from train import markdown

WHAT = ("small", "billion", "rank46", "muon", "memory", "in_backward")
FSDP = ("ours", "fsdp2", "fsdp1")  # DDP does not shard
KINDS = ("default", "fused")
SMALL_RANKS = 8
BILLION_RANKS = 64
TOKENS = 8  # a sequence just long enough for gradients to exist


# -- in the child: one engine, one rank of a fake process group ------------------------------------


def small(name: str, repeat: int) -> dict[str, Any]:
    """Return medians in CPU seconds of clipping and of the step, by implementation, or why it refused."""
    result: dict[str, Any] = {}
    steps: dict[str, Callable[[], tuple[float, float]]] = {}
    for label in KINDS:
        step = small_step(name, IMPLEMENTATIONS[label])
        try:
            for _ in range(5):
                step()
        except Exception as error:
            result[label] = {"refused": reason(error)}
        else:
            steps[label] = step
    times: dict[str, list[tuple[float, float]]] = {label: [] for label in steps}
    gc.collect()
    for _ in range(repeat):
        for label, step in steps.items():
            times[label].append(step())
    for label, turns in times.items():
        clip, optimizer = (statistics.median(column) for column in zip(*turns, strict=True))
        result[label] = {"clip": clip, "step": optimizer}
    return result


def small_step(name: str, options: dict[str, Any]) -> Callable[[], tuple[float, float]]:
    """Return a whole step of the small layers that gives the CPU seconds of clipping and of the optimizer."""
    torch.manual_seed(0)
    plain = Stack()
    dims = [p.dim() for p in plain.parameters()]
    model, clip = wrap(name, plain, plain.layers, torch.device("cpu"))
    optimizer = torch.optim.AdamW(decay_groups(model.parameters(), dims), lr=1e-3, **options)
    x = torch.randn(8, WIDTH)

    def step() -> tuple[float, float]:
        optimizer.zero_grad()
        model(x).backward()
        return cpu(lambda: clip(1.0)), cpu(optimizer.step)

    return step


def billion(name: str, repeat: int) -> dict[str, Any]:
    """Return medians in wall seconds of the step, by implementation and threads, or why it refused."""
    threads = torch.get_num_threads()
    result: dict[str, Any] = {"threads": threads}
    optimizers: dict[str, torch.optim.AdamW] = {}
    with torch.device("meta"):
        plain = GPT(BILLION)
    dims = [p.dim() for p in plain.parameters()]
    model = wrap_from_meta(name, plain, plain.blocks, fill)
    constant_gradients(model, torch.zeros(1, TOKENS, dtype=torch.long))
    for label in KINDS:
        groups = decay_groups(model.parameters(), dims)
        optimizer = torch.optim.AdamW(groups, lr=1e-3, **IMPLEMENTATIONS[label])
        try:
            for _ in range(3):
                optimizer.step()
        except Exception as error:
            result[label] = {"refused": reason(error)}
        else:
            optimizers[label] = optimizer
    times: dict[str, dict[str, list[float]]] = {label: {"all": [], "one": []} for label in optimizers}
    gc.collect()
    for _ in range(repeat):
        for count, column in ((threads, "all"), (1, "one")):
            torch.set_num_threads(count)
            for label, optimizer in optimizers.items():
                start = time.perf_counter()
                optimizer.step()
                times[label][column].append(time.perf_counter() - start)
    for label, columns in times.items():
        result[label] = {column: statistics.median(values) for column, values in columns.items()}
    return result


def constant_gradients(model: nn.Module, tokens: Tensor) -> None:
    """Give every parameter a gradient as the engine does, then numbers that the fake group did not make."""
    model(tokens, tokens).backward()
    for p in model.parameters():
        if p.grad is not None:  # FSDP1: this rank holds nothing of it
            p.grad.fill_(1e-3)


def measure(args: argparse.Namespace) -> None:
    """Run in a process of its own: one engine, one rank; print the result."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    # What the fake group does not write may be anything; denormal numbers would cost time.
    torch.set_flush_denormal(True)
    if args.what == "small":
        torch.set_num_threads(1)
    ranks = SMALL_RANKS if args.what == "small" else BILLION_RANKS
    dist.init_process_group("fake", store=FakeStore(), rank=args.rank, world_size=ranks)
    print(json.dumps(small(args.engine, args.repeat) if args.what == "small" else billion(args.engine, args.repeat)))
    dist.destroy_process_group()


# -- the parent ------------------------------------------------------------------------------------


def child(what: str, engine: str, rank: int, repeat: int) -> dict[str, Any]:
    command = [sys.executable, __file__, "--what", what, "--engine", engine]
    command += ["--rank", str(rank), "--repeat", str(repeat)]
    environment = {**os.environ, "TORCH_CPP_LOG_LEVEL": "ERROR"}
    environment.pop("OMP_NUM_THREADS", None)
    if what == "small":
        environment["OMP_NUM_THREADS"] = "1"
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"{what} of {engine} as rank {rank} failed:\n{done.stderr}")
    values: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return values


def in_turns(
    what: str, cases: Iterable[tuple[str, int]], passes: int, repeat: int
) -> dict[tuple[str, int], list[dict[str, Any]]]:
    """Run every case in `passes` processes, one after the other, another pass when all had one."""
    runs: dict[tuple[str, int], list[dict[str, Any]]] = {case: [] for case in cases}
    for _ in range(passes):
        for engine, rank in runs:
            runs[engine, rank].append(child(what, engine, rank, repeat))
    return runs


def cell(runs: list[dict[str, Any]], label: str, key: str) -> str:
    """Return the median of all processes in ms, and each of them; or that the engine refused."""
    if "refused" in runs[0][label]:
        return "refused"
    values = [run[label][key] * 1e3 for run in runs]
    each = f" ({', '.join(f'{v:.2f}' for v in values)})" if len(values) > 1 else ""
    return f"**{statistics.median(values):.2f}**{each}"


def footnotes(runs: dict[tuple[str, int], list[dict[str, Any]]]) -> None:
    refused = {
        f"- {LABELS[engine]}, {label}: {values[0][label]['refused']}"
        for (engine, _), values in runs.items()
        for label in KINDS
        if "refused" in values[0][label]
    }
    if refused:
        print("\nRefused:\n" + "\n".join(sorted(refused)))


def report_small(args: argparse.Namespace) -> None:
    names = [name for name in args.engines if name in FSDP]
    cases = [("alone", 0), *((name, rank) for name in names for rank in (0, SMALL_RANKS - 1))]
    runs = in_turns("small", cases, args.passes, args.repeat)
    count = sum(p.numel() for p in Stack().parameters()) // LAYERS
    print(
        f"{LAYERS} layers of {count} parameters, {SMALL_RANKS} ranks, CPU time, medians of {args.repeat} "
        f"steps in each of {args.passes} processes: median, all processes\n"
    )
    rows = [
        [
            LABELS[engine],
            str(rank) if engine != "alone" else "",
            cell(values, "default", "step"),
            cell(values, "fused", "step"),
            cell(values, "default", "clip"),
        ]
        for (engine, rank), values in runs.items()
    ]
    print(markdown("engine | as rank | AdamW step ms, default | AdamW step ms, fused | clip ms", rows))
    footnotes(runs)


def report_billion(args: argparse.Namespace) -> None:
    passes = min(args.passes, 2)  # the gradients of 1B parameters take their time
    runs = in_turns("billion", [(name, 0) for name in args.engines if name in FSDP], passes, args.repeat)
    with torch.device("meta"):
        count = sum(p.numel() for p in GPT(BILLION).parameters())
    print(
        f"{count / 1e9:.2f}B parameters, {BILLION_RANKS} ranks, one rank's AdamW step, wall time, medians of "
        f"{args.repeat} steps in each of {passes} processes: median, all processes\n"
    )
    rows = [
        [
            LABELS[engine],
            str(values[0]["threads"] if column == "all" else 1),
            cell(values, "default", column),
            cell(values, "fused", column),
        ]
        for column in ("all", "one")
        for (engine, _), values in runs.items()
    ]
    print(markdown("engine | threads | step ms, default | step ms, fused", rows))
    footnotes(runs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--what", default=",".join(WHAT), help="some of: %(default)s")
    parser.add_argument("--engines", help="default ours,fsdp2,fsdp1,ddp, short: ours,fsdp2")
    parser.add_argument("--repeat", type=int, default=30, help="steps in each process of small and billion")
    parser.add_argument("--passes", type=int, default=3, help="processes for each engine there")
    parser.add_argument("--rounds", type=int, default=20, help="turns of each engine with 2 ranks; muon: a fifth")
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--tiny", action="store_true", help="models of 0.2M with 2 ranks, to try the script")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        return measure(args)
    args.engines = (args.engines or ("ours,fsdp2" if args.short else "ours,fsdp2,fsdp1,ddp")).split(",")
    if args.short:
        args.repeat, args.passes, args.rounds = 5, 1, 4
    what = args.what.split(",")
    for table in what:
        if table not in WHAT:
            parser.error(f"--what: {table!r} is not one of {', '.join(WHAT)}")
    # Two Gloo ranks with one thread each, as in train.py; inherited by the ranks.
    args.device, args.ranks, args.threads, args.batch = "cpu", 2, 1, 2
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

    print(
        f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} CPU cores, {date.today()}",
        flush=True,
    )
    reports: dict[str, Callable[[argparse.Namespace], None]] = {
        "small": report_small,
        "billion": report_billion,
        "rank46": report_rank46,
        "muon": report_muon,
        "memory": report_memory,
        "in_backward": report_in_backward,
    }
    for table in WHAT:
        if table in what:
            print()
            reports[table](args)
            sys.stdout.flush()


if __name__ == "__main__":
    main()
