"""A rank that begins to save and then simply ends: `python -m tests.checkpoint.leaver FOLDER RANK WORLD_SIZE PORT KIND`."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from tests.checkpoint.helpers import build, save, train, whole
from tests.support.odd_model import Net
from torch_shard.checkpoint.sharded import save as sharded_save

original = sharded_save.write_file


def slow(folder: Path, plan: Any, resolve: Any) -> Any:
    time.sleep(1.0)
    if sys.argv[5] == "fails":
        raise OSError("no space left")
    return original(folder, plan, resolve)


if __name__ == "__main__":
    rank, world_size, port = map(int, sys.argv[2:5])
    # Rank 0's process holds the store: it must not leave before the others have heard from it.
    store = dist.TCPStore("127.0.0.1", port, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    del store
    torch.set_num_threads(1)
    model, engine, optimizer = build(model=Net, timeout=20.0)
    train(model, optimizer, rank, range(2))
    expected = whole(engine, optimizer)
    if rank == 0:
        torch.save(expected, Path(sys.argv[1], "expected"))
    sharded_save.write_file = slow
    save(engine, Path(sys.argv[1], "c"), optimizer, asynchronous=True)
    dist.destroy_process_group()
