"""The rank that serves the store may end its process with an error: the other ranks must get that error all the same."""

from __future__ import annotations

import socket
import subprocess
import sys
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import torch_shard
from tests.support.marks import exhaustive
from tests.support.run_python import variables
from torch_shard.comm.store_messages import Messages

LATE = 1.0  # seconds by which rank 1 reads later than rank 0


def leave(way: str) -> None:
    """Fail on every rank; rank 0 serves the store, and ends at once."""
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    engine = torch_shard.shard(model, units=["0", "1"], timeout=20.0)
    if rank == 1:
        changed = Messages.changed

        def late(self: Messages) -> bool:
            time.sleep(LATE)
            return changed(self)

        Messages.changed = late  # type: ignore[method-assign]
    if way == "a load that fails on rank 0":
        engine.save("saved")
        engine.load("missing" if rank == 0 else "saved")
    else:
        model[rank](torch.ones(2, 4))


@pytest.mark.parametrize(
    ("way", "kind"),
    [
        ("forwards of different units", "DivergenceError"),
        *exhaustive(("a load that fails on rank 0", "CheckpointError")),
    ],
)
def test_all_ranks_get_the_error_though_the_store_ends_with_rank_0(way, kind, tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", __name__, way],
            env=variables(RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port),
            cwd=tmp_path,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [process.communicate(timeout=60.0)[0] for process in ranks]
    assert [process.returncode for process in ranks] == [1, 1], outputs
    assert all(f"torch_shard.errors.{kind}: " in output.strip().splitlines()[-1] for output in outputs), outputs


if __name__ == "__main__":
    leave(sys.argv[1])
