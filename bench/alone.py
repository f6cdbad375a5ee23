"""Reading a model on one rank alone, beside the collective gather of it: time, and bytes that come in.

    python bench/alone.py                 201M parameters, 4 Gloo ranks
    python bench/alone.py --short         25M parameters, 2 ranks, fewer rounds

Both take turns in the same processes. *Together*, all ranks call ``engine.state_dict()``, of which rank 0 keeps the values.
*Alone*, rank 0 calls it while the others wait in a barrier. A forward without gradients is measured in the same two ways. A time
is rank 0's, from a barrier to the end of its call.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import engines  # noqa: F401 (puts the examples on the path)
import torch
import torch.distributed as dist
from gpt import GPT, GPTConfig
from train import finish, markdown, spawn, spread, start

import torch_shard

LARGE = GPTConfig(layers=16, width=1024, heads=16, context=128, vocab=256)
SMALL = GPTConfig(layers=8, width=512, heads=8, context=128, vocab=256)


def rank_main(rank: int, args: argparse.Namespace, folder: str) -> None:
    start(rank, args, folder)
    torch.manual_seed(0)
    model = GPT(SMALL if args.short else LARGE)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    engine = torch_shard.shard(model)
    tokens = torch.zeros(1, 1, dtype=torch.int64)

    def forward() -> None:
        with torch.no_grad():
            model(tokens)

    works: dict[str, Callable[[], Any]] = {"state dict": engine.state_dict, "forward": forward}
    times: dict[str, list[float]] = {f"{work}, {way}": [] for work in works for way in ("together", "alone")}
    read = 0
    for turn in range(args.rounds + 1):
        for name, work in works.items():
            for way in ("together", "alone"):
                before = engine.statistics().lone_bytes
                dist.barrier()
                begin = time.perf_counter()
                if rank == 0 or way == "together":
                    work()
                if turn and rank == 0:  # the first turn makes connections and memory
                    times[f"{name}, {way}"].append(time.perf_counter() - begin)
                dist.barrier()
                read = engine.statistics().lone_bytes - before
    finish(rank, folder, {"times": times, "size": size, "read": read})


def report(args: argparse.Namespace, result: dict[str, Any]) -> None:
    times, rows = result["times"], []
    for name in ("state dict", "forward"):
        together, alone = (times[f"{name}, {way}"] for way in ("together", "alone"))
        ratio = spread([a / b for a, b in zip(alone, together, strict=True)])
        rows.append([name, spread(together), spread(alone), ratio])
    print(
        f"{result['size'] / 4e6:.1f}M parameters, {args.ranks} ranks, torch {torch.__version__}, {args.rounds} rounds; "
        f"{result['read'] / 2**20:.1f} of {result['size'] / 2**20:.1f} MiB are read from other ranks\n"
    )
    print(markdown("what | together, s | alone, s | alone / together, by round", rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--short", action="store_true", help="a small model, 2 ranks and 3 rounds")
    parser.add_argument("--rounds", type=int, help="turns of each; default 8, short: 3")
    args = parser.parse_args()
    args.ranks, args.threads, args.device = 2 if args.short else 4, 1, "cpu"
    args.rounds = args.rounds or (3 if args.short else 8)
    report(args, spawn(rank_main, args))


if __name__ == "__main__":
    main()
