"""What quantized communication sends, and what it does to the loss: the demo's model trained with each setting.

    python bench/quantized.py                two Gloo ranks on this machine's CPU, 300 steps of each
    python bench/quantized.py --steps 20     to try the script
    python bench/quantized.py --only none,both

Every run begins with the same weights and sees the same batches, but for three exact ones, which show by how much chance
alone moves the loss. Losses and bytes do not depend on the time that the machine takes.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import engines  # noqa: F401 (puts the examples on the path)
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from gpt import GPT, PRESETS
from stdlib_text import StdlibText

import torch_shard
from torch_shard import Quantized

GLOBAL_BATCH = 16
HELD_OUT_WINDOWS = 256
AHEAD = {"other": 1_000_000, "third": 2_000_000}  # steps, in the batches of these runs
SEEDS = {"weights": 1}  # of the first weights; 0 in the other runs

SETTINGS: dict[str, tuple[str, Quantized | None]] = {
    "none": ("exact", None),
    "other": ("exact, other batches", None),
    "third": ("exact, other batches again", None),
    "weights": ("exact, other first weights", None),
    "int8": ("int8 parameters", Quantized("int8")),
    "float8": ("float8 parameters", Quantized("float8")),
    "gradients": ("int8 gradients", Quantized(gradients="int8")),
    "both": ("int8 both", Quantized("int8", "int8")),
    "rounded": ("int8 both, no error feedback", Quantized("int8", "int8", error_feedback=False)),
}


def run(rank: int, name: str, args: argparse.Namespace, folder: str) -> None:
    """Train and judge one setting, on each rank."""
    torch.set_num_threads(1)
    rendezvous = f"file://{folder}/{name}"
    dist.init_process_group("gloo", init_method=rendezvous, rank=rank, world_size=args.ranks)
    text, config = StdlibText(), PRESETS["tiny"]
    size = GLOBAL_BATCH // args.ranks
    torch.manual_seed(SEEDS.get(name, 0))
    model = GPT(config)
    engine = torch_shard.shard(model, quantized=SETTINGS[name][1])
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.1)
    warm_up = max(1, args.steps // 10)
    began, sent = time.perf_counter(), 0
    for step in range(args.steps):
        # The demo's schedule.
        rate = min((step + 1) / warm_up, 0.55 + 0.45 * math.cos(math.pi * step / args.steps))
        for group in optimizer.param_groups:
            group["lr"] = 3e-3 * rate
        before = engine.bytes_sent
        model(*text.batch(step + AHEAD.get(name, 0), rank, size, config.context)).backward()
        sent = engine.bytes_sent - before
        engine.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    seconds = time.perf_counter() - began
    residual = engine.memory_summary()["gradients"]
    sharded = judge(model, text, args.ranks, rank)
    engine.close(optimizer)
    stored = judge(model, text, args.ranks, rank)
    if rank == 0:
        result = {"sent": sent, "loss": sharded, "stored": stored, "residual": residual, "seconds": seconds}
        (Path(folder) / f"{name}.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


@torch.no_grad()
def judge(model: GPT, text: StdlibText, world_size: int, rank: int) -> float:
    """Return the mean loss on the held-out windows, in nats per byte. Collective."""
    tokens, targets = (w[rank::world_size] for w in text.held_out_windows(HELD_OUT_WINDOWS, model.config.context))
    losses = [model(x, y) * len(x) for x, y in zip(tokens.split(16), targets.split(16), strict=True)]
    total = torch.stack(losses).sum() / len(tokens)
    dist.all_reduce(total)
    return total.item() / world_size


def report(results: dict[str, dict[str, Any]]) -> None:
    exact = results.get("none")
    columns = [
        "sent",
        "KiB sent per rank and step",
        "of exact",
        "held-out loss, as computed",
        "of what is stored",
        "difference from exact",
        "KiB of residual per rank",
    ]
    lines = [columns, ["---"] * len(columns)]
    for name, r in results.items():
        lines.append(
            [
                SETTINGS[name][0],
                f"{r['sent'] / 1024:.0f}",
                f"{r['sent'] / exact['sent']:.3f}" if exact else "",
                f"{r['loss']:.4f}",
                f"{r['stored']:.4f}",
                f"{r['stored'] - exact['stored']:+.4f}" if exact else "",
                f"{r['residual'] / 1024:.0f}",
            ]
        )
    print("\n".join("| " + " | ".join(line) + " |" for line in lines))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--only", help=f"some of: {','.join(SETTINGS)}")
    args = parser.parse_args()
    names = args.only.split(",") if args.only else list(SETTINGS)
    for name in names:
        if name not in SETTINGS:
            parser.error(f"--only: {name!r} is not one of {', '.join(SETTINGS)}")
    if args.ranks < 1 or GLOBAL_BATCH % args.ranks:
        parser.error(f"--ranks must divide the batch of {GLOBAL_BATCH}")
    os.environ["OMP_NUM_THREADS"] = "1"
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    count = sum(p.numel() for p in GPT(PRESETS["tiny"]).parameters())
    print(
        f"{count / 1e6:.2f}M parameters, fp32, AdamW, clipping, {args.steps} steps of {GLOBAL_BATCH} windows; {args.ranks} "
        f"rank(s); torch {torch.__version__}, Python {platform.python_version()}, {date.today()}\n",
        flush=True,
    )
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in names:
            mp.spawn(run, (name, args, folder), nprocs=args.ranks)
            results[name] = json.loads((Path(folder) / f"{name}.json").read_text())
            print(f"{SETTINGS[name][0]}: {results[name]['seconds']:.0f} s", flush=True)
    print()
    report(results)


if __name__ == "__main__":
    main()
