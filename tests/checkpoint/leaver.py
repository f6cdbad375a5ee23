"""Ranks that begin to save and then simply end: `torchrun -m tests.checkpoint.leaver FOLDER KIND`."""

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
    if sys.argv[2] == "fails":
        raise OSError("no space left")
    return original(folder, plan, resolve)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    model, engine, optimizer = build(model=Net, timeout=20.0)
    train(model, optimizer, dist.get_rank(), range(2))
    expected = whole(engine, optimizer)
    if dist.get_rank() == 0:
        torch.save(expected, Path(sys.argv[1], "expected"))
    sharded_save.write_file = slow
    save(engine, Path(sys.argv[1], "c"), optimizer, asynchronous=True)
    dist.destroy_process_group()
