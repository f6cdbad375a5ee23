"""A training step on GPUs: its time, the host's part of it, kernels and memory, beside the plain model, DDP and FSDP2.

    python bench/gpu.py                 all GPUs, a decoder of 1.3B parameters
    python bench/gpu.py --size small    a small one, whose step takes as long as the host needs to give it to the device
    python bench/gpu.py --ranks 2       also on one GPU: ranks share it and send through sockets. Kernels can be
                                        counted then, but times say nothing
    python bench/gpu.py --smoke         a tiny model on the CPU, to try the script

All engines live in the same processes and take turns. Computation is in bf16, gradients are summed in fp32, parameters and
AdamW's state are fp32; the plain model and DDP run under autocast. All have torch's fused AdamW.
"""

from __future__ import annotations

import argparse
import gc
import os
import platform
import statistics
import time
import warnings
from collections import Counter
from datetime import date
from pathlib import Path
from typing import Any

import torch
from offload_steps import waiting
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile
from train import finish, markdown, spawn, spread

from torch_shard.selftest.model import Size, batch, make
from torch_shard.selftest.ranks import Ranks
from torch_shard.selftest.speed import Runner, build, step_flops

SIZES = {
    "tiny": Size(layers=2, width=64, heads=2, context=32, vocab=256, batch=2),
    "small": Size(layers=12, width=512, heads=8, context=128, vocab=8192, batch=1),
    "medium": Size(layers=24, width=1024, heads=16, context=1024, vocab=32768, batch=4),
    "large": Size(layers=24, width=2048, heads=16, context=2048, vocab=32768, batch=2),
}
LABELS = {"plain": "plain, one rank alone", "DDP": "DDP", "FSDP2": "FSDP2", "torch_shard": "torch_shard"}
GIB = 2**30


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def allocated(device: torch.device) -> int:
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else 0


def start(rank: int, args: argparse.Namespace, folder: str) -> Ranks:
    """Join the process group of this run."""
    warnings.filterwarnings("ignore")
    os.environ.update(RANK=str(rank), WORLD_SIZE=str(args.ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(args.port))
    os.environ["LOCAL_RANK"] = str(rank)
    if args.smoke:
        return Ranks("cpu")
    return Ranks("cuda", shares=torch.cuda.device_count() < args.ranks)


def make_runner(name: str, size: Size, ranks: Ranks) -> Runner:
    """Put the model under an engine."""
    if name != "plain":
        return build(name, size, ranks, torch.bfloat16)
    model = make(size, ranks.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=ranks.device.type == "cuda" or None)
    return Runner(name, model, optimizer, torch.bfloat16)


def compare(rank: int, args: argparse.Namespace, folder: str) -> None:
    """Measure all engines on one rank; rank 0 hands the figures on."""
    ranks = start(rank, args, folder)
    size, device = SIZES[args.size], ranks.device
    data = batch(size, device, 0, rank)
    found: dict[str, dict[str, Any]] = {}
    runners = []
    for name in args.engines:
        before = allocated(device)
        runner = make_runner(name, size, ranks)
        for _ in range(max(1, args.warm_up)):
            loss = runner.step(data)
        synchronize(device)
        gc.collect()
        found[name] = {"wall": [], "host": [], "loss": loss.item(), "held": allocated(device) - before, "peak": 0}
        runners.append(runner)
    for turn in range(args.rounds):
        first = turn % len(runners)  # no engine always follows the same one
        for runner in runners[first:] + runners[:first]:
            seconds, host, above = timed(runner, data, ranks, args.steps)
            everywhere = ranks.gather((seconds, host, above))
            own = found[runner.name]
            own["wall"].append(max(e[0] for e in everywhere))  # a step has ended when its slowest rank has
            own["host"].append(max(e[1] for e in everywhere))
            own["peak"] = max(own["peak"], own["held"] + max(e[2] for e in everywhere))
    for runner in runners:
        ranks.meet()
        if device.type == "cuda":
            keep = None
            if args.traces and rank == 0:
                keep = Path(args.traces) / f"{args.size}-{args.ranks}-{runner.name}.json.gz"
            found[runner.name]["trace"] = traced(runner, data, keep)
    finish(rank, folder, found)


def timed(runner: Runner, data: Any, ranks: Ranks, steps: int) -> tuple[float, float, int]:
    """Return the seconds of one of `steps` steps in a row, those after which the host was free again, and the most bytes that
    a step allocates beside what is held between steps."""
    device = ranks.device
    gc.collect()
    ranks.meet()
    base = allocated(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    began = time.perf_counter()
    for _ in range(steps):
        runner.step(data)
    free = time.perf_counter()
    synchronize(device)
    ended = time.perf_counter()
    above = torch.cuda.max_memory_allocated(device) - base if device.type == "cuda" else 0
    return (ended - began) / steps, (free - began) / steps, above


def traced(runner: Runner, data: Any, keep: Path | None, steps: int = 2) -> dict[str, Any]:
    """Return the kernels of a step, their milliseconds, and the share of the time in which none ran."""
    runner.step(data)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            runner.step(data)
        torch.cuda.synchronize()
    if keep is not None:
        profiler.export_chrome_trace(str(keep))
    # Also on the device's side are ranges that Python has named.
    events = [e for e in profiler.events() if e.device_type == DeviceType.CUDA and not e.is_user_annotation]
    kinds, spent = Counter[str](), Counter[str]()
    for event in events:
        kind = kind_of(event.name)
        kinds[kind] += 1
        spent[kind] += event.time_range.end - event.time_range.start
    spans = [(e.time_range.start, e.time_range.end) for e in events]
    idle, _ = waiting(spans, (), min(s for s, _ in spans), max(e for _, e in spans))
    return {
        "kernels": {kind: kinds[kind] / steps for kind in KINDS},
        "ms": {kind: spent[kind] / steps / 1000 for kind in KINDS},
        "idle": idle,
        "names": [(name, count / steps) for name, count in Counter(e.name for e in events).most_common(60)],
    }


KINDS = ("compute", "copies", "nccl")


def kind_of(name: str) -> str:
    """Return whether what ran is one of NCCL's kernels, a copy of the device's copy engine, or any other kernel."""
    if "nccl" in name.lower():
        return "nccl"
    return "copies" if name.startswith(("Memcpy", "Memset")) else "compute"


def report(args: argparse.Namespace, found: dict[str, dict[str, Any]], peak: float | None) -> None:
    """Print the tables."""
    size = SIZES[args.size]
    flops = step_flops(size)
    rows = []
    for name, own in found.items():
        seconds = statistics.median(own["wall"])
        pairs = zip(own["wall"], found[args.engines[-1]]["wall"], strict=True)
        trace = own.get("trace")
        rows.append(
            [
                LABELS[name],
                spread([1000 * s for s in own["wall"]]),
                f"{statistics.median(a / b for a, b in pairs):.2f}",
                f"{args.ranks * size.tokens / seconds:,.0f}",
                f"{flops / seconds / peak:.1%}" if peak else "",
                f"{1000 * statistics.median(own['host']):.2f}",
                f"{own['held'] / GIB:.2f}",
                f"{own['peak'] / GIB:.2f}",
                *([f"{trace['kernels'][k]:g}, {trace['ms'][k]:.2f}" for k in KINDS] if trace else [""] * len(KINDS)),
                f"{trace['idle']:.1%}" if trace else "",
                f"{own['loss']:.4f}",
            ]
        )
    head = (
        f"engine | step ms (min, median, max) | of {LABELS[args.engines[-1]]}'s | tokens/s | MFU | host ms | held GiB | peak GiB"
        " | kernels a step, ms | copies | NCCL | device idle | loss"
    )
    print(markdown(head, rows), flush=True)
    if args.details:
        for name, own in found.items():
            for kernel, count in own.get("trace", {}).get("names", ()):
                print(f"{name}: {count:g} {kernel[:150]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--size", choices=SIZES, default="large")
    parser.add_argument("--ranks", type=int, help="default: all GPUs")
    parser.add_argument("--engines", default="", help=f"some of: {','.join(LABELS)}; ratios are to the last")
    parser.add_argument("--rounds", type=int, default=8, help="turns of each engine")
    parser.add_argument("--steps", type=int, default=5, help="of an engine in a row")
    parser.add_argument("--warm-up", type=int, default=5, help="steps of each engine that are not timed")
    parser.add_argument("--traces", help="write a trace of each engine into this directory")
    parser.add_argument("--details", action="store_true", help="name the kernels")
    parser.add_argument("--port", type=int, default=29511, help="over which ranks find each other")
    parser.add_argument("--smoke", action="store_true", help="a tiny model on the CPU")
    args = parser.parse_args()
    if args.smoke:
        args.size, args.ranks, args.rounds, args.steps = "tiny", args.ranks or 2, 2, 2
    elif not torch.cuda.is_available():
        parser.error("no GPU here: --smoke runs a tiny model on the CPU")
    args.ranks = args.ranks or torch.cuda.device_count()
    default = [name for name in LABELS if args.ranks == 1 or name != "plain"]
    args.engines = args.engines.split(",") if args.engines else default
    for name in args.engines:
        if name not in LABELS:
            parser.error(f"--engines: {name!r} is not one of {', '.join(LABELS)}")
    where, peak = "CPU", None
    if not args.smoke:
        from torch_shard.selftest.devices import peak_flops

        where, peak = torch.cuda.get_device_name(), peak_flops(torch.device("cuda", 0), None)
    count = sum(p.numel() for p in make(SIZES[args.size], torch.device("meta")).parameters())
    print(
        f"{count / 1e6:.0f}M parameters, {SIZES[args.size].tokens} tokens a step and rank, bf16; {args.ranks} rank(s), {where}; "
        f"torch {torch.__version__}, Python {platform.python_version()}, {date.today()}\n",
        flush=True,
    )
    report(args, spawn(compare, args), peak)


if __name__ == "__main__":
    main()
