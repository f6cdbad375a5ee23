"""Ranks that come late or not at all, over NCCL: as over Gloo."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from torch import nn

import torch_shard
from tests.gpu.models import GPT, Block, tokens, train_step
from tests.support.ranks import ranks, run
from torch_shard.errors import DivergenceError, MissingRankError, ShardError

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU, and torch sees none here")

LATE = 3.0  # seconds: more than the engine waits before it says in what


@ranks(2, backend="nccl", timeout=240)
def test_a_late_rank_is_waited_for(rank, device):
    torch.manual_seed(0)
    model = GPT(width=24).to(device)
    if rank == 1:
        time.sleep(LATE)
    engine = torch_shard.shard(model, units=[Block], timeout=60.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(3):
        if rank == step % 2:
            time.sleep(LATE)  # before a forward
        loss = model(tokens(rank, step, device)).square().mean()
        if rank == step % 2:
            time.sleep(LATE)  # before a backward
        loss.backward()
        if rank == step % 2:
            time.sleep(LATE)
        engine.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    if rank == 0:
        time.sleep(LATE)
    state = engine.state_dict()
    assert bool(state) == (rank == 0)


# -- errors: the bodies end their processes themselves, since a collective without its partner keeps the GPU busy, and what
# would wait for the GPU at the end of a process waits for that -----------------------------------------------------------


def end(rank: int, folder: Path) -> NoReturn:
    """Say that the body of this rank came to its end, and stop at once."""
    (folder / str(rank)).touch()
    os._exit(0)


def run_to_the_end(body: Callable[..., Any], folder: Path) -> None:
    run(2, body, folder, backend="nccl", may_die=(0, 1), timeout=120)
    assert sorted(path.name for path in folder.iterdir()) == ["0", "1"]


def comes_only_once(rank: int, world_size: int, folder: Path) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    model = GPT(width=24).to(device)
    engine = torch_shard.shard(model, units=[Block], timeout=5.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    train_step(model, optimizer, tokens(rank, 0, device), engine)
    torch.cuda.synchronize(device)
    if rank == 1:
        time.sleep(15.0)
        end(rank, folder)
    started = time.monotonic()
    with pytest.raises(MissingRankError, match="rank 1"):
        model(tokens(rank, 1, device))
    assert 4.0 < time.monotonic() - started < 10.0
    end(rank, folder)


def test_a_rank_that_does_not_come_is_an_error_after_the_timeout(tmp_path):
    run_to_the_end(comes_only_once, tmp_path)


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.branches = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])

    def forward(self, x: torch.Tensor, branch: int) -> torch.Tensor:
        return self.branches[branch](x)


def takes_another_branch(rank: int, world_size: int, folder: Path) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    model = Branches().to(device)
    torch_shard.shard(model, units=[nn.Linear], timeout=10.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.ones(2, 4, device=device)
    for _ in range(2):  # the first two iterations look at gathered values, which waits for the device
        model(x, 0).sum().backward()
    torch.cuda.synchronize(device)
    # Rank 0 does what it remembers, and its host runs on to the optimizer's step; rank 1 asks first.
    with pytest.raises(DivergenceError, match=r"branches\.0.*branches\.1|branches\.1.*branches\.0"):
        model(x, rank).sum().backward()
        optimizer.step()
    end(rank, folder)


def test_ranks_that_run_different_units_are_an_error_on_both(tmp_path):
    run_to_the_end(takes_another_branch, tmp_path)


def fails_in_backward(rank: int, world_size: int, folder: Path) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    model = GPT(width=24).to(device)
    torch_shard.shard(model, units=[Block], timeout=5.0)
    for step in range(2):
        output = model(tokens(rank, step, device))
        if rank == 1 and step == 1:
            output = Fails.apply(output)
        with pytest.raises((ZeroDivisionError, ShardError)) if step == 1 else contextlib.nullcontext():
            output.square().mean().backward()
    end(rank, folder)


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        raise ZeroDivisionError("on purpose")


def test_an_exception_in_backward_on_one_rank_is_an_error_on_both(tmp_path):
    run_to_the_end(fails_in_backward, tmp_path)
