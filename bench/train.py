"""Step time, CPU time, bytes sent, memory and exactness, beside DDP, FSDP1 and FSDP2, and under Accelerate.

    python bench/train.py                two Gloo ranks on this machine's CPU, GPT of 46M parameters
    python bench/train.py --short        fewer rounds
    python bench/train.py --dtype bf16   mixed precision
    python bench/train.py --device cuda  all GPUs (NCCL), or --ranks on one GPU (Gloo)

All engines live in the same processes, one process per rank, and take turns step by step, so that
whatever else the machine does hits all of them. Memory is measured in further processes, one set
for each engine.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import platform
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from counting import CollectiveCounter
from engines import ENGINES, FRONT_ENDS, LABELS, LOW_PRECISION, REPORTED, Runner, build, full_parameters
from gpt import GPT, GPTConfig
from torch import Tensor

# 46.3M parameters: twelve blocks of 3.15M between an embedding and a head of 4.2M each.
CONFIG = GPTConfig(layers=12, width=512, heads=8, context=128, vocab=8192)
SMALL = GPTConfig(layers=2, width=64, heads=2, context=32, vocab=256)
LR = 1e-3
MIB = 2**20


def batch(step: int, rank: int, size: int, config: GPTConfig, device: torch.device) -> list[Tensor]:
    """Return random tokens and targets, the same for every engine."""
    generator = torch.Generator().manual_seed(1_000_003 * step + rank)
    tokens = torch.randint(config.vocab, (size, config.context + 1), generator=generator)
    return [tokens[:, :-1].to(device), tokens[:, 1:].to(device)]


def start(rank: int, args: argparse.Namespace, folder: str) -> torch.device:
    """Join the process group of this run; return this rank's device."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(args.threads)
    device, backend = torch.device("cpu"), "gloo"
    if args.device == "cuda":
        device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(device)
        # NCCL refuses two ranks on one GPU.
        backend = "nccl" if torch.cuda.device_count() >= args.ranks else "cpu:gloo,cuda:gloo"
    dist.init_process_group(backend, init_method=f"file://{folder}/rendezvous", rank=rank, world_size=args.ranks)
    return device


def finish(rank: int, folder: str, result: Any) -> None:
    """Hand rank 0's `result` to the parent and leave together."""
    if rank == 0:
        (Path(folder) / "result.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# -- time, bytes, exactness: all engines in one process per rank ---------------------------------


def compare(rank: int, args: argparse.Namespace, folder: str) -> None:
    device = start(rank, args, folder)
    config = SMALL if args.tiny else CONFIG
    runners = [build(name, config, device, LR, args.low) for name in args.engines]
    result: dict[str, dict[str, Any]] = {name: {} for name in args.engines}

    plain = train_plainly(args, config, device)
    for runner in runners:
        for step in range(args.exact_steps):
            runner.step(*batch(step, rank, args.batch, config, device))
        if runner.name == "alone":
            continue  # it saw one rank's batches only
        pairs = zip(full_parameters(runner), plain, strict=True)
        result[runner.name]["difference"] = max((a - b).abs().max().item() for a, b in pairs)
    del plain

    for runner in runners:
        data = batch(args.exact_steps, rank, args.batch, config, device)
        with CollectiveCounter(doubled_reduce_scatter=dist.get_backend() != "nccl") as counter:
            runner.step(*data)
        result[runner.name]["sent"] = counter.sent
        calls: dict[str, int] = {}
        for call in counter.calls:
            calls[call.name] = calls.get(call.name, 0) + 1
        result[runner.name]["calls"] = calls

    wall: dict[str, list[float]] = {name: [] for name in args.engines}
    cpu: dict[str, list[float]] = {name: [] for name in args.engines}
    for turn in range(args.rounds):
        data = batch(args.exact_steps + 1 + turn, rank, args.batch, config, device)
        first = turn % len(runners)  # no engine always follows the same one
        for runner in runners[first:] + runners[:first]:
            seconds, cpu_seconds = timed_steps(runner, data, device, args.steps)
            wall[runner.name].append(seconds)
            cpu[runner.name].append(cpu_seconds)
    everywhere: list[Any] = [None] * args.ranks
    dist.all_gather_object(everywhere, (wall, cpu))
    for name in args.engines:
        # A step has ended when its slowest rank has.
        result[name]["wall"] = [max(step) for step in zip(*(w[name] for w, _ in everywhere), strict=True)]
        result[name]["cpu"] = [statistics.fmean(step) for step in zip(*(c[name] for _, c in everywhere), strict=True)]
    finish(rank, folder, result)


def train_plainly(args: argparse.Namespace, config: GPTConfig, device: torch.device) -> list[Tensor]:
    """Train without any engine on the batches of all ranks; return the parameters."""
    runner = build("alone", config, device, LR)
    for step in range(args.exact_steps):
        for rank in range(args.ranks):
            loss = runner.model(*batch(step, rank, args.batch, config, device))
            (loss / args.ranks).backward()
        runner.clip(1.0)
        runner.optimizer.step()
        runner.optimizer.zero_grad()
    return [p.detach() for p in runner.model.parameters()]


def timed_steps(runner: Runner, data: list[Tensor], device: torch.device, count: int) -> tuple[float, float]:
    """Return wall and CPU seconds of one of `count` steps in a row on this rank, all its threads together."""
    gc.collect()
    synchronize(device)
    dist.barrier()
    wall, cpu = time.perf_counter(), time.process_time()
    for _ in range(count):
        runner.step(*data)
    runner.settle()  # else the next engine would pay for it
    synchronize(device)
    return (time.perf_counter() - wall) / count, (time.process_time() - cpu) / count


# -- memory: one engine in processes of its own ----------------------------------------------------


def memory(rank: int, args: argparse.Namespace, folder: str) -> None:
    (name,) = args.engines
    device = start(rank, args, folder)
    config = SMALL if args.tiny else CONFIG
    if device.type == "cpu":
        # Blocks of 1 MiB and more go back to the system when freed, for every engine alike;
        # otherwise the resident size is that of the allocator's free lists too.
        libc().mallopt(-3, MIB)  # M_MMAP_THRESHOLD
    # Everything that is loaded or allocated once and for all, before the baseline.
    # A plain model of the same size makes the libraries allocate their work space.
    for engine, size in (("alone", config), (name, SMALL)):
        warm = build(engine, size, device, LR, args.low)
        for step in range(3):
            warm.step(*batch(step, rank, args.batch, size, device))
        del warm
    base = settle(device)

    runner = build(name, config, device, LR, args.low)
    set_up = peak(device) - base
    settle(device)
    for step in range(args.exact_steps):
        runner.step(*batch(step, rank, args.batch, config, device))
    steps = peak(device) - base
    idle = settle(device) - base
    ranks: list[Any] = [None] * args.ranks
    dist.all_gather_object(ranks, (set_up, steps, idle))
    columns = [max(column) for column in zip(*ranks, strict=True)]
    finish(rank, folder, dict(zip(("set_up", "steps", "idle"), columns, strict=True)))


def libc() -> Any:
    return ctypes.CDLL(None)


def settle(device: torch.device) -> int:
    """Free what is not used, begin a new peak, and return the bytes in use."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        return torch.cuda.memory_allocated(device)
    libc().malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # VmHWM starts anew
    return status("VmRSS")


def peak(device: torch.device) -> int:
    """Return the most bytes in use since `settle`."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    return status("VmHWM")


def status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    raise RuntimeError(f"no {key} in /proc/self/status")


# -- the parent ------------------------------------------------------------------------------------


def spawn(function: Callable[..., None], args: argparse.Namespace) -> Any:
    """Run `function` on all ranks, each a process; return what rank 0 handed to `finish`."""
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(function, (args, folder), nprocs=args.ranks)
        return json.loads((Path(folder) / "result.json").read_text())


def spread(values: list[float]) -> str:
    low, middle, high = min(values), statistics.median(values), max(values)
    return f"{low:.3f} **{middle:.3f}** {high:.3f}"


def markdown(header: str, rows: list[list[str]]) -> str:
    columns = header.split(" | ")
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def report_steps(args: argparse.Namespace, result: dict[str, dict[str, Any]]) -> None:
    def ratio(name: str, to: str, of: str = "wall") -> str:
        if to not in result:
            return ""
        # Of the same round, so that a slow moment of the machine is in both.
        pairs = zip(result[name][of], result[to][of], strict=True)
        return f"{statistics.median(a / b for a, b in pairs):.2f}"

    rows = [
        [
            LABELS[name],
            spread(values["wall"]),
            *(ratio(name, to) for to in ("fsdp2", "fsdp1", "ddp", "ours")),
            spread(values["cpu"]),
            ratio(name, "ours", "cpu"),
            f"{values['sent'] / MIB:.1f}",
            f"{values['difference']:.1e}" if "difference" in values else "",
        ]
        for name, values in result.items()
    ]
    print(
        markdown(
            "engine | step s (min, median, max) | of FSDP2's | of FSDP1's | of DDP's | of torch_shard's | "
            "CPU s per rank (min, median, max) | of torch_shard's | sent MiB per rank and step | "
            f"difference from plain after {args.exact_steps} steps",
            rows,
        )
    )
    print("\nCollectives per step:")
    for name, values in result.items():
        calls = ", ".join(f"{count} {op}" for op, count in sorted(values["calls"].items()))
        print(f"- {LABELS[name]}: {calls or 'none'}")


def report_memory(args: argparse.Namespace, result: dict[str, dict[str, int]], theory: float) -> None:
    rows = [
        [LABELS[name], *(f"{values[key] / MIB:.1f}" for key in ("set_up", "steps", "idle"))]
        for name, values in result.items()
    ]
    print("\n" + markdown("engine | peak MiB in set-up | peak MiB in steps | idle MiB", rows))
    print(
        f"\nMost of all ranks, above what the process held before the model. Weights and Adam "
        f"moments alone, sharded: {theory / MIB:.1f} MiB."
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--ranks", type=int, help="default 2, or all GPUs")
    parser.add_argument("--dtype", choices=["fp32", "bf16"], default="fp32", help="of the computation")
    parser.add_argument("--engines", help=f"some of: {','.join((*LOW_PRECISION, *FRONT_ENDS, REPORTED))}")
    parser.add_argument("--rounds", type=int, default=12, help="timed steps of each engine")
    parser.add_argument(
        "--steps", type=int, default=1, help="of an engine in a row, in each round; what is reported is of one"
    )
    parser.add_argument("--batch", type=int, default=2, help="sequences per rank and step")
    parser.add_argument("--exact-steps", type=int, default=4, help="steps before comparing")
    parser.add_argument("--threads", type=int, default=1, help="of torch, per rank")
    parser.add_argument("--no-memory", action="store_true")
    parser.add_argument("--short", action="store_true", help="4 rounds")
    parser.add_argument("--tiny", action="store_true", help="a model of 0.2M, to try the script")
    args = parser.parse_args()
    args.low = torch.bfloat16 if args.dtype == "bf16" else None
    usual = (*(ENGINES if args.low is None else LOW_PRECISION), *FRONT_ENDS)
    known = (*usual, REPORTED)
    args.engines = args.engines.split(",") if args.engines else list(usual)
    for name in args.engines:
        if name not in known:
            parser.error(f"--engines: {name!r} is not one of {', '.join(known)}")
    args.ranks = args.ranks or (torch.cuda.device_count() if args.device == "cuda" else 2)
    if args.ranks < 1:
        parser.error("--device cuda: no GPU here")
    if args.short:
        args.rounds = min(args.rounds, 4)
    # Inherited by the ranks: an intra-op pool of another size is hard to change later.
    os.environ["OMP_NUM_THREADS"] = str(args.threads)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")

    with torch.device("meta"):
        count = sum(p.numel() for p in GPT(SMALL if args.tiny else CONFIG).parameters())
    where = torch.cuda.get_device_name() if args.device == "cuda" else f"{os.cpu_count()} CPU cores"
    print(
        f"{count / 1e6:.1f}M parameters, {args.dtype}, AdamW, clipping; {args.ranks} rank(s), {where}; "
        f"torch {torch.__version__}, Python {platform.python_version()}, {date.today()}; "
        f"{args.rounds} rounds\n",
        flush=True,
    )
    report_steps(args, spawn(compare, args))
    sys.stdout.flush()
    if not args.no_memory:
        used = {}
        for name in args.engines:
            one = argparse.Namespace(**{**vars(args), "engines": [name]})
            used[name] = spawn(memory, one)
        report_memory(args, used, 12 * count / args.ranks)


if __name__ == "__main__":
    main()
