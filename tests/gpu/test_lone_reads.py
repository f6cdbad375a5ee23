"""One rank reads a model on GPUs alone, while the others wait: its values come through host memory."""

from __future__ import annotations

import io

import pytest
import torch
import torch.distributed as dist

import torch_shard
from tests.gpu.models import GPT, tokens, train_step
from tests.support.ranks import ranks

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and torch sees none here")


def read_alone(rank: int, device: torch.device) -> None:
    torch.manual_seed(0)
    plain, model = GPT().to(device), GPT().to(device)
    model.load_state_dict(plain.state_dict())
    engine = torch_shard.shard(model, unit_bytes=2000, timeout=60.0)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (plain, model)]
    x = tokens(0, 0, device)  # the same on all ranks
    for _ in range(3):
        for each, optimizer in zip((plain, model), optimizers, strict=True):
            train_step(each, optimizer, x)
        if rank == 0:
            with torch.no_grad():
                torch.testing.assert_close(model.blocks[0].up.weight.norm(), plain.blocks[0].up.weight.norm())
                torch.testing.assert_close(model(x), plain(x))
            file = io.BytesIO()
            torch.save(model.state_dict(), file)
            file.seek(0)
            torch.testing.assert_close(dict(torch.load(file)), dict(plain.state_dict()))
        dist.barrier()
    assert (engine.statistics().lone_reads > 0) == (rank == 0)


@ranks(2, timeout=240)
def test_rank_0_of_those_that_share_a_gpu_reads_alone(rank, device):
    read_alone(rank, device)


@ranks(2, backend="nccl", timeout=240)
def test_rank_0_reads_alone_over_nccl(rank, device):
    read_alone(rank, device)
