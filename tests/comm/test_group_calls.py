"""Collectives begun on the process group itself: what torch.distributed's own functions give, complex numbers too."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from tests.support.marks import exhaustive
from tests.support.ranks import ranks
from torch_shard.comm import process_group_ops


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@ranks(2)
def test_each_gives_what_the_public_function_gives(dtype: torch.dtype) -> None:
    _compare(dtype)


@ranks(2)
def test_the_methods_of_older_torch_take_the_same_arguments() -> None:
    older = {
        "_ALL_GATHER": "_allgather_base",
        "_REDUCE_SCATTER": "_reduce_scatter_base",
        "_ALL_TO_ALL": "alltoall_base",
    }
    with mock.patch.multiple(process_group_ops, **older):
        _compare(torch.float32)


@exhaustive
def test_under_detailed_debugging_training_gives_the_same_loss() -> None:
    """Each group is wrapped then, and compares the ranks' calls before it runs them."""
    losses = [_train({"TORCH_DISTRIBUTED_DEBUG": level}) for level in ("OFF", "DETAIL")]
    assert losses[0] == losses[1]


def _compare(dtype: torch.dtype) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    group = dist.new_group(list(range(world)))

    def of(rank: int) -> torch.Tensor:
        return torch.arange(4).to(dtype) * (rank + 1) + (1j if dtype.is_complex else 0.5)

    mine, everyone = of(rank), [of(other) for other in range(world)]
    half, total = slice(2 * rank, 2 * rank + 2), torch.stack(everyone).sum(0)

    gathered = torch.empty(4 * world, dtype=dtype)
    process_group_ops.all_gather(group, gathered, mine).wait()
    assert torch.equal(gathered, torch.cat(everyone))
    received = torch.empty(4, dtype=dtype)
    process_group_ops.all_to_all(group, received, mine).wait()
    assert torch.equal(received, torch.cat([other[half] for other in everyone]))
    part = torch.empty(2, dtype=dtype)
    process_group_ops.reduce_scatter(group, part, mine.clone()).wait()
    assert torch.equal(part, total[half])
    for root in range(world):
        sent = mine.clone()
        process_group_ops.broadcast(group, sent, root).wait()
        assert torch.equal(sent, everyone[root])
    summed = mine.clone()
    process_group_ops.all_reduce(group, summed).wait()
    assert torch.equal(summed, total)
    dist.destroy_process_group(group)


_TRAINING = """
import torch, torch.distributed as dist, torch.multiprocessing as mp, torch_shard

def main(rank, store):
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(6, 5), torch.nn.Tanh(), torch.nn.Linear(5, 1))
    torch_shard.shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(torch.full((2, 6), rank + 1.0)).square().mean()
        loss.backward()
        optimizer.step()
    if rank == 0:
        print(loss.item())
    dist.destroy_process_group()

if __name__ == "__main__":
"""


def _train(environment: dict[str, str]) -> str:

    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder) / "training.py"
        script.write_text(_TRAINING)
        done = subprocess.run(
            [sys.executable, str(script)], capture_output=True, text=True, env={**os.environ, **environment}, check=True
        )
    return done.stdout.strip().splitlines()[-1]
