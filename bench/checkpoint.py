"""Saving and loading sharded checkpoints with 2 Gloo ranks: time, beside FSDP2 with torch.distributed.checkpoint and beside
plain writes and reads of the same bytes.

    python bench/checkpoint.py                 201M parameters with AdamW's state
    python bench/checkpoint.py --short         25M parameters, fewer rounds

All take turns in the same processes. A time lies between two barriers. Each save goes to a new directory, and is made durable
(fsync); the last one is deleted outside the measured time. Loads find the files in the page cache, as all do.
"""

from __future__ import annotations

import argparse
import gc
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from engines import LABELS, wrap
from gpt import GPT, GPTConfig
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from train import finish, markdown, spawn, spread, start

import torch_shard

CPU = torch.device("cpu")
LARGE = GPTConfig(layers=16, width=1024, heads=16, context=128, vocab=256)
SMALL = GPTConfig(layers=8, width=512, heads=8, context=128, vocab=256)
PLAIN, BLOCK = "plain", 4 << 20
NAMES = {**LABELS, PLAIN: "plain writes and reads", "fsdp2": "FSDP2 with torch.distributed.checkpoint"}


class Engine:
    """A model with AdamW's state under one engine."""

    def __init__(self, name: str, config: GPTConfig) -> None:
        torch.manual_seed(0)
        plain = GPT(config)
        self.model, _ = wrap(name, plain, plain.blocks, CPU)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        for p in self.model.parameters():
            p.grad = torch.full_like(p, 1e-3)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def save(self, path: Path) -> None:
        raise NotImplementedError

    def load(self, path: Path) -> None:
        raise NotImplementedError


class Ours(Engine):
    def save(self, path: Path) -> None:
        engine = torch_shard.engine_of(self.model)
        assert engine is not None
        engine.save(path, self.optimizer)

    def load(self, path: Path) -> None:
        engine = torch_shard.engine_of(self.model)
        assert engine is not None
        engine.load(path, self.optimizer)


class Peer(Engine):
    def save(self, path: Path) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.save({"model": model, "optim": optimizer}, checkpoint_id=path)

    def load(self, path: Path) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.load({"model": model, "optim": optimizer}, checkpoint_id=path)
        set_state_dict(self.model, self.optimizer, model_state_dict=model, optim_state_dict=optimizer)


class Plain:
    """What an engine's rank holds, in one file for each rank."""

    def __init__(self, other: Engine) -> None:
        self.tensors = list(tensors_of(other.model, other.optimizer))

    def save(self, path: Path) -> None:
        path.mkdir(exist_ok=True)
        with open(path / f"{dist.get_rank()}", "wb", buffering=0) as file:
            for block in self._blocks():
                file.write(block)
            os.fsync(file.fileno())

    def load(self, path: Path) -> None:
        with open(path / f"{dist.get_rank()}", "rb", buffering=0) as file:
            for block in self._blocks():
                file.readinto(block)

    def _blocks(self) -> Iterator[memoryview]:
        for tensor in self.tensors:
            view = memoryview(tensor.view(torch.uint8).numpy())
            for at in range(0, len(view), BLOCK):
                yield view[at : at + BLOCK]


def tensors_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[Tensor]:
    """Yield copies of this rank's slices of weights and moments, 1-D."""
    for p in model.parameters():
        for value in (p, *optimizer.state[p].values()):
            local: Any = value.detach()
            local = local.to_local() if hasattr(local, "to_local") else local
            if local.dim() or local.numel() > 1:
                yield local.clone().reshape(-1)


def timed(function: Callable[[Path], None], path: Path) -> float:
    """Seconds from a barrier until the slowest rank is through."""
    dist.barrier()
    begin = time.perf_counter()
    function(path)
    dist.barrier()
    return time.perf_counter() - begin


def rank_main(rank: int, args: argparse.Namespace, folder: str) -> None:
    start(rank, args, folder)
    config = SMALL if args.short else LARGE
    held: dict[str, Any] = {"ours": Ours("ours", config), "fsdp2": Peer("fsdp2", config)}
    held[PLAIN] = Plain(held["ours"])
    gc.collect()
    size = sum(t.nbytes for t in held[PLAIN].tensors)
    names = list(held)
    result: dict[str, Any] = {name: {"save": [], "load": []} for name in names}
    for number in range(args.rounds + 1):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            path = Path(args.folder or folder) / name
            saved = timed(held[name].save, path)
            loaded = timed(held[name].load, path)
            if number:  # the first round imports and warms up
                result[name]["save"].append(saved)
                result[name]["load"].append(loaded)
            if rank == 0:
                shutil.rmtree(path)
            dist.barrier()
    result["size"] = size
    result["parameters"] = sum(p.numel() for p in held["ours"].model.parameters())
    finish(rank, folder, result)


def report(args: argparse.Namespace, result: dict[str, Any]) -> None:
    rows = []
    for name in ("ours", "fsdp2", PLAIN):
        row = [NAMES[name]]
        for what in ("save", "load"):
            times = result[name][what]
            row.append(spread(times))
            for other in ("fsdp2", PLAIN):
                pairs = zip(times, result[other][what], strict=True)
                row.append(f"{statistics.median(a / b for a, b in pairs):.2f}")
        rows.append(row)
    print(
        f"{result['parameters'] / 1e6:.1f}M parameters with AdamW's state, {result['size'] / 2**20:.0f} MiB on each of 2 ranks; "
        f"torch {torch.__version__}; {args.rounds} rounds (min, median, max; ratios are medians within a round)\n"
    )
    header = "engine | save s | of FSDP2's | of plain writes | load s | of FSDP2's | of plain reads"
    print(markdown(header, rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--short", action="store_true", help="a small model and 3 rounds")
    parser.add_argument("--rounds", type=int, help="turns of each; default 6, short: 3")
    parser.add_argument("--folder", help="where to save; default a temporary directory")
    args = parser.parse_args()
    args.ranks, args.threads, args.device = 2, 1, "cpu"
    args.rounds = args.rounds or (3 if args.short else 6)
    report(args, spawn(rank_main, args))


if __name__ == "__main__":
    main()
