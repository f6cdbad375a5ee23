"""Saving and loading checkpoints with 2 Gloo ranks: time, beside FSDP2 with torch.distributed.checkpoint and beside plain
writes and reads of the same bytes; how long an asynchronous save holds up training; memory of loading a full file.

    python bench/checkpoint.py                 201M parameters with AdamW's state
    python bench/checkpoint.py --short         25M parameters, fewer rounds

All take turns in the same processes. A time lies between two barriers. Each save goes to a new directory, and is made durable
(fsync); the last one is deleted outside the measured time. Loads find the files in the page cache, as all do. An asynchronous
save is waited for before the next turn. Memory is measured in further processes: anonymous bytes, since those of mapped files
are the system's to take back.
"""

from __future__ import annotations

import abc
import argparse
import gc
import os
import shutil
import statistics
import threading
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
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from train import MIB, finish, libc, markdown, spawn, spread, start, status

import torch_shard

CPU = torch.device("cpu")
LARGE = GPTConfig(layers=16, width=1024, heads=16, context=128, vocab=256)
SMALL = GPTConfig(layers=8, width=512, heads=8, context=128, vocab=256)
PLAIN, BLOCK = "plain", 4 << 20
NAMES = {**LABELS, PLAIN: "plain writes and reads", "fsdp2": "FSDP2 with torch.distributed.checkpoint"}


class Engine(abc.ABC):
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

    @abc.abstractmethod
    def save(self, path: Path) -> None:
        """Save to a new directory."""

    @abc.abstractmethod
    def load(self, path: Path) -> None:
        """Load what was saved."""

    @abc.abstractmethod
    def save_asynchronously(self, path: Path) -> None:
        """Begin to save."""

    @abc.abstractmethod
    def wait(self) -> None:
        """End what was begun."""


class Ours(Engine):
    @property
    def engine(self) -> torch_shard.Engine:
        engine = torch_shard.engine_of(self.model)
        assert engine is not None
        return engine

    def save(self, path: Path) -> None:
        self.engine.save(path, self.optimizer)

    def load(self, path: Path) -> None:
        self.engine.load(path, self.optimizer)

    def save_asynchronously(self, path: Path) -> None:
        self.engine.save(path, self.optimizer, asynchronous=True)

    def wait(self) -> None:
        self.engine.finish_saving()


class Peer(Engine):
    group: Any = None

    def save(self, path: Path) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        dcp.save({"model": model, "optim": optimizer}, checkpoint_id=path)

    def save_asynchronously(self, path: Path) -> None:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        # Its thread uses collectives, which would pair with those of the main thread.
        self.group = self.group or dist.new_group(backend="gloo")
        contents = {"model": model, "optim": optimizer}
        self.pending = dcp.async_save(contents, checkpoint_id=path, process_group=self.group)

    def wait(self) -> None:
        future: Any = self.pending
        getattr(future, "upload_completion", future).result()

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
    result: dict[str, Any] = {name: {"save": [], "load": [], "stall": [], "rest": []} for name in names}
    for number in range(args.rounds + 1):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            path = Path(args.folder or folder) / name
            times = {"save": timed(held[name].save, path), "load": timed(held[name].load, path)}
            remove(rank, path)
            if name != PLAIN:
                times["stall"] = timed(held[name].save_asynchronously, path)
                times["rest"] = timed(lambda _, name=name: held[name].wait(), path)
                remove(rank, path)
            if number:  # the first round imports, and allocates what is kept
                for what, seconds in times.items():
                    result[name][what].append(seconds)
            elif name != PLAIN:
                result[name]["first"] = times["stall"]
    result["size"] = size
    result["parameters"] = sum(p.numel() for p in held["ours"].model.parameters())
    finish(rank, folder, result)


def remove(rank: int, path: Path) -> None:
    if rank == 0:
        shutil.rmtree(path)
    dist.barrier()


def report(args: argparse.Namespace, result: dict[str, Any]) -> None:
    def ratio(name: str, what: str, other: str, of: str) -> str:
        pairs = zip(result[name][what], result[other][of], strict=True)
        return f"{statistics.median(a / b for a, b in pairs):.2f}"

    rows = []
    for name in ("ours", "fsdp2", PLAIN):
        row = [NAMES[name]]
        for what in ("save", "load"):
            row += [spread(result[name][what]), ratio(name, what, "fsdp2", what), ratio(name, what, PLAIN, what)]
        rows.append(row)
    print(
        f"{result['parameters'] / 1e6:.1f}M parameters with AdamW's state, {result['size'] / MIB:.0f} MiB on each of 2 ranks; "
        f"torch {torch.__version__}; {args.rounds} rounds (min, median, max; ratios are medians within a round)\n"
    )
    header = "engine | save s | of FSDP2's | of plain writes | load s | of FSDP2's | of plain reads"
    print(markdown(header, rows))
    rows = [
        [
            NAMES[name],
            spread(result[name]["stall"]),
            ratio(name, "stall", name, "save"),
            f"{result[name]['first']:.3f}",
            spread(result[name]["rest"]),
        ]
        for name in ("ours", "fsdp2")
    ]
    print(
        "\n" + markdown("engine | asynchronous save: stall s | of its save | first stall s | then writes for s", rows)
    )


# -- memory: one way of loading in processes of its own -------------------------------------------


def memory(rank: int, args: argparse.Namespace, folder: str) -> None:
    start(rank, args, folder)
    libc().mallopt(-3, MIB)  # as in train.py: what is freed goes back to the system
    config = SMALL if args.short else LARGE
    path = Path(folder) / ("full.safetensors" if args.way == "safetensors" else "full.pt")
    name = "fsdp2" if args.way == "fsdp2" else "ours"
    held: Any = Ours(name, config) if name == "ours" else Peer(name, config)
    optimizer = None if args.way == "safetensors" else held.optimizer
    with anonymous() as saving:
        if name == "ours":
            held.engine.save_full(path, optimizer)
        else:
            options = StateDictOptions(full_state_dict=True, cpu_offload=True)
            model, state = get_state_dict(held.model, optimizer, options=options)
            if rank == 0:
                torch.save({"model": model, "optimizer": state}, path)
            del model, state
    dist.barrier()
    with anonymous() as loading:
        if name == "ours":
            held.engine.load(path, optimizer)
        else:
            found = torch.load(path, mmap=True, weights_only=True)
            options = StateDictOptions(full_state_dict=True)
            set_state_dict(
                held.model,
                held.optimizer,
                model_state_dict=found["model"],
                optim_state_dict=found["optimizer"],
                options=options,
            )
            del found
    ranks: list[Any] = [None] * args.ranks
    dist.all_gather_object(ranks, (saving.peak, loading.peak))
    unit = max(sum(p.numel() * p.element_size() for p in block.parameters()) for block in held.model.blocks)
    finish(rank, folder, {"ranks": ranks, "unit": unit})


class anonymous:
    """The most anonymous memory above that at the beginning, looked at by a thread every other millisecond."""

    def __enter__(self) -> anonymous:
        gc.collect()
        libc().malloc_trim(0)
        self.base, self.peak, self.ended = status("RssAnon"), 0, threading.Event()
        self.thread = threading.Thread(target=self._look)
        self.thread.start()
        return self

    def _look(self) -> None:
        while not self.ended.wait(0.002):
            self.peak = max(self.peak, status("RssAnon") - self.base)

    def __exit__(self, *error: object) -> None:
        self.ended.set()
        self.thread.join()


WAYS = {
    "torch": "torch_shard, one torch file, model and AdamW",
    "safetensors": "torch_shard, one safetensors file, model",
    "fsdp2": "FSDP2 and torch.save, model and AdamW",
}


def report_memory(results: dict[str, dict[str, Any]]) -> None:
    rows = []
    for way, result in results.items():
        row = [WAYS[way]]
        for column in zip(*result["ranks"], strict=True):
            row += [f"{size / MIB:.0f} ({size / result['unit']:.1f})" for size in column]
        rows.append(row)
    unit = next(iter(results.values()))["unit"]
    print(f"\nPeak anonymous MiB above what was resident before, and in units of {unit / MIB:.0f} MiB:\n")
    print(markdown("form | saving, rank 0 | saving, rank 1 | loading, rank 0 | loading, rank 1", rows))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--short", action="store_true", help="a small model and 3 rounds")
    parser.add_argument("--rounds", type=int, help="turns of each; default 6, short: 3")
    parser.add_argument("--folder", help="where to save; default a temporary directory")
    parser.add_argument("--only-memory", action="store_true", help="no times")
    args = parser.parse_args()
    args.ranks, args.threads, args.device = 2, 1, "cpu"
    args.rounds = args.rounds or (3 if args.short else 6)
    if not args.only_memory:
        report(args, spawn(rank_main, args))
    results = {}
    for args.way in WAYS:
        results[args.way] = spawn(memory, args)
    report_memory(results)


if __name__ == "__main__":
    main()
