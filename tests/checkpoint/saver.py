"""Two ranks that save one checkpoint after the other, until they are killed: `python -m tests.checkpoint.saver FOLDER`,
with `offload` behind it to keep optimizer state on disk.

Each line on standard input starts two of them, in a process group of their own whose number is printed, and "gone" when they
are.
"""

from __future__ import annotations

import multiprocessing
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import torch_shard
from torch_shard.checkpoint import load, save
from torch_shard.checkpoint.format.atomic_directory import find
from torch_shard.errors import CheckpointError


def rank_main(rank: int, world_size: int, port: int, path: Path, offload: bool) -> None:
    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(500, 500), nn.Linear(500, 500))
    engine = torch_shard.shard(model, offload=torch_shard.Offload(nvme=path / "state") if offload else None)
    optimizer = torch.optim.AdamW(model.parameters())
    step = 0
    there = True
    try:
        find(path / "c")
    except CheckpointError:
        there = False
    dist.barrier()
    if there:
        step = load(engine, path / "c", optimizer)
    if rank == 0:
        (path / "running").touch()
    while True:
        step += 1
        model(torch.ones(1, 500)).sum().backward()
        optimizer.step()
        save(engine, path / "c", optimizer, extra=step, asynchronous=step % 2 == 0)


if __name__ == "__main__":
    # torch, and what its optimizers import at their first step, is imported once: that takes longer than a round.
    warm = nn.Parameter(torch.ones(1))
    warm.grad = torch.ones(1)
    torch.optim.AdamW([warm]).step()
    context = multiprocessing.get_context("fork")
    for _ in sys.stdin:
        server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        arguments = server.port, Path(sys.argv[1]), "offload" in sys.argv
        made = [context.Process(target=rank_main, args=(rank, 2, *arguments)) for rank in range(2)]
        for process in made:
            process.start()
            os.setpgid(process.pid or 0, made[0].pid or 0)
        print(made[0].pid, flush=True)
        for process in made:
            process.join()
        print("gone", flush=True)
