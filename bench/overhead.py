"""What an engine itself costs: 64 small layers on a process group that does no communication.

    python bench/overhead.py             8, 64 and 1024 ranks
    python bench/overhead.py --short     8 ranks, fewer repetitions

One process plays one rank of many. The engine's work per layer and step is

    step under the engine - the same step of the plain model - the group's own cost

where a step is zero_grad, forward and backward, times are CPU seconds of this process, and the group's
own cost is that of calling exactly the collectives of that step again, alone. The three take turns,
and what counts is the median of the differences within a turn, so that a machine whose speed
drifts does not show; each engine runs in several processes, in turns with the others. (The fake
group copies the input into each rank's place of an all-gather's output; with 1024 ranks that is
most of a step.) The optimizer's step and clipping are timed apart.
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
from collections.abc import Callable
from datetime import date
from typing import Any

import torch
import torch.distributed as dist
from counting import CollectiveCounter
from engines import LABELS, wrap
from gpt import GPT, GPTConfig
from torch import Tensor, nn
from torch.testing._internal.distributed.fake_pg import FakeStore

LAYERS = 64
WIDTH = 64
BILLION = GPTConfig(layers=20, width=2048, heads=16, context=1024, vocab=256)


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.linear(self.norm(x))


class Stack(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def cpu(function: Callable[[], Any]) -> float:
    """Return the CPU seconds of one call."""
    start = time.process_time()
    function()
    return time.process_time() - start


def median_cpu(function: Callable[[], Any], repeat: int, before: Callable[[], Any] = int) -> float:
    """Return the median CPU seconds of `function`; `before` runs ahead of each call, untimed."""
    times = []
    gc.collect()
    for _ in range(repeat):
        before()
        times.append(cpu(function))
    return statistics.median(times)


def overhead(name: str, repeat: int) -> dict[str, float]:
    """Return medians in seconds for one engine; the process group exists."""
    forward_backward, clip, optimizer = prepare(name)
    plain, _, _ = prepare("alone")
    counter = CollectiveCounter(keep_replays=True)
    with counter:
        forward_backward()

    def group() -> None:
        for call in counter.calls:
            call.replay()

    gc.collect()
    turns = [(cpu(forward_backward), cpu(plain), cpu(group)) for _ in range(repeat)]
    return {
        "own": statistics.median(step - layer - sent for step, layer, sent in turns),
        "plain": statistics.median(layer for _, layer, _ in turns),
        "group": statistics.median(sent for *_, sent in turns),
        "clip": median_cpu(lambda: clip(1.0), repeat, before=forward_backward),
        "optimizer": median_cpu(optimizer.step, repeat, before=forward_backward),
        "calls": len(counter.calls),
    }


def prepare(name: str) -> tuple[Callable[[], None], Callable[[float], Any], torch.optim.Optimizer]:
    """Return a step's forward and backward under an engine, its clipping and its optimizer, all warm."""
    torch.manual_seed(0)
    plain = Stack()
    model, clip = wrap(name, plain, plain.layers, torch.device("cpu"))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    x = torch.randn(8, WIDTH)

    def forward_backward() -> None:
        optimizer.zero_grad()
        model(x).backward()

    for _ in range(5):
        forward_backward()
        clip(1.0)
        optimizer.step()
    return forward_backward, clip, optimizer


def set_up(name: str) -> dict[str, float]:
    """Time sharding the 1B model, built on meta, up to initialised shards. Imports are not counted for any engine."""
    import torch.distributed.fsdp

    import torch_shard

    with torch.device("meta"):
        model = GPT(BILLION)
    wall, cpu = time.perf_counter(), time.process_time()
    if name == "ours":
        torch_shard.shard(model, init_fn=fill, sync_module_states=False)
    elif name == "fsdp1":
        from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        def materialise(module: nn.Module) -> None:
            module.to_empty(device="cpu", recurse=False)
            fill(module)

        FSDP(
            model,
            use_orig_params=True,
            auto_wrap_policy=ModuleWrapPolicy({type(model.blocks[0])}),
            device_id=torch.device("cpu"),
            param_init_fn=materialise,
        )
    else:
        wrap(name, model, model.blocks, torch.device("cpu"))
        model.to_empty(device="cpu")
        for module in model.modules():
            fill(module)
    return {"wall": time.perf_counter() - wall, "cpu": time.process_time() - cpu}


@torch.no_grad()
def fill(module: nn.Module) -> None:
    """Initialise one module's own parameters: the same, cheapest work under every engine."""
    for param in module.parameters(recurse=False):
        param.fill_(0.02)


def measure(args: argparse.Namespace) -> None:
    """Run in a process of its own: one engine, one number of ranks; print the result."""
    warnings.filterwarnings("ignore", category=FutureWarning)
    torch.set_num_threads(1)
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=args.ranks)
    run = overhead(args.engine, args.repeat) if args.what == "overhead" else set_up(args.engine)
    print(json.dumps(run))
    dist.destroy_process_group()


def child(what: str, engine: str, ranks: int, repeat: int) -> dict[str, float]:
    command = [sys.executable, __file__, "--what", what, "--engine", engine]
    command += ["--ranks", str(ranks), "--repeat", str(repeat)]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_CPP_LOG_LEVEL": "ERROR"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode:
        raise RuntimeError(f"{what} of {engine} at {ranks} ranks failed:\n{done.stderr}")
    values: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--engines", default="ours,fsdp2,fsdp1")
    parser.add_argument("--ranks", help="comma-separated; default 8,64,1024, short: 8")
    parser.add_argument("--repeat", type=int, default=30)
    parser.add_argument("--passes", type=int, default=5, help="processes for each engine")
    parser.add_argument("--short", action="store_true")
    parser.add_argument("--what", choices=["overhead", "set_up"], help="one of the two only")
    parser.add_argument("--engine", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine:
        args.ranks = int(args.ranks)
        return measure(args)
    repeat, passes = (10, 1) if args.short else (args.repeat, args.passes)
    ranks = [int(n) for n in (args.ranks or ("8" if args.short else "8,64,1024")).split(",")]
    engines = args.engines.split(",")
    print(
        f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} CPU cores, {date.today()}\n"
    )
    runs: dict[str, list[dict[str, float]]]
    if args.what != "set_up":
        print(
            f"{LAYERS} layers of {WIDTH * (WIDTH + 3)} parameters, CPU time, medians of {repeat} steps in each of {passes} "
            "processes\n"
        )
        print(
            "| ranks | engine | engine µs per layer and step: median, all processes | group's own µs per layer | "
            "collectives per step | clip ms | AdamW step ms |"
        )
        print("| --- | --- | --- | --- | --- | --- | --- |")
        micro = 1e6 / LAYERS
        plain = child("overhead", "alone", 1, repeat)
        row = f"| | no engine | ({plain['plain'] * micro:.0f} for the layer itself) | 0 | 0 "
        print(f"{row}| {plain['clip'] * 1e3:.1f} | {plain['optimizer'] * 1e3:.1f} |")
        for world in ranks:
            runs = {name: [] for name in engines}
            for _ in range(passes):
                for name in engines:
                    runs[name].append(child("overhead", name, world, repeat))
            for name in engines:
                t = {key: statistics.median(run[key] for run in runs[name]) for key in runs[name][0]}
                each = ", ".join(f"{run['own'] * micro:.0f}" for run in runs[name])
                print(
                    f"| {world} | {LABELS[name]} | **{t['own'] * micro:.0f}** ({each}) | "
                    f"{t['group'] * micro:.0f} | {t['calls']:.0f} | {t['clip'] * 1e3:.1f} | "
                    f"{t['optimizer'] * 1e3:.1f} |",
                    flush=True,
                )
    if args.what != "overhead":
        with torch.device("meta"):
            count = sum(p.numel() for p in GPT(BILLION).parameters())
        print(f"\nSet-up of {count / 1e9:.2f}B parameters from meta at 64 ranks, constant fill\n")
        print("| engine | wall s | CPU s |\n| --- | --- | --- |")
        runs = {name: [] for name in engines}
        for _ in range(passes):
            for name in engines:
                runs[name].append(child("set_up", name, 64, 0))
        for name in engines:
            wall, cpu = (statistics.median(run[key] for run in runs[name]) for key in ("wall", "cpu"))
            print(f"| {LABELS[name]} | {wall:.2f} | {cpu:.2f} |", flush=True)


if __name__ == "__main__":
    main()
